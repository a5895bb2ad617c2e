"""Programs that are cut over members, all of which run in lockstep on one device, beside whole."""

import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from models import GPT
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import pfeife
from gpu.beside_eager import Rounding, alike, values_of
from gpu.cases import words_loss
from gpu.correctness import fused
from gpu.rows import Row, Setting, Skipped, Wrong
from gpu.timing import Large
from pfeife.cost import default_machine
from pfeife.cost.estimate import member_prices
from pfeife.ir.members import ALONE, MEANING
from pfeife.ir.nodes import node_bytes
from pfeife.passes.member_ways import Prices

CUT = Rounding(1e-5, "sums that are cut are added up in another order")
HALVES = Rounding(3e-2, "sums of bfloat16 are rounded where they are cut")
EVERYTHING = Prices(  # with these each operation is computed on parts that can be
    compute=lambda node: float(node_bytes(node) + 1), send=lambda size: 1e-3 * size, copy=float
)


def collectives(program: pfeife.Program) -> dict[str, int]:
    """How often members tell one another something, by its name."""
    targets = [node.target for node in program.module.graph.nodes]
    return {each.__name__: targets.count(each) for each in MEANING.keys() - ALONE}


def cut(name: str, members: int, everything: bool, setting: Setting) -> dict[str, Any]:
    """A model whose parameters are cut, by a GPU's prices or wherever that can be."""
    whole = fused(name, setting)
    machine = default_machine(torch.device(setting.device))
    prices = EVERYTHING if everything else member_prices(machine)
    local = pfeife.shard("cut", members, unknown="gather", prices=prices)(whole.flat)
    found = pfeife.evaluate(pfeife.fuse()(local), whole.state, whole.microbatches)
    wanted = values_of(pfeife.evaluate(whole.flat, whole.state, whole.microbatches))
    return {**alike(values_of(found), wanted, CUT), **collectives(local)}


def attention(kernel: str, dtype: torch.dtype, setting: Setting) -> dict[str, Any]:
    """One head over a long sequence, which alone can be cut, causal and not."""
    torch.manual_seed(0)
    length, width = (64, 8) if setting.small else (1024, 64)
    layer = nn.Linear(width, 3 * width).to(setting.device, dtype)
    batch = torch.randn(1, 1, length, width, device=setting.device).to(dtype)
    figures: dict[str, Any] = {}
    ways = itertools.product((False, True), (2, 4), ("gather", "ring"))
    for causal, members, how in ways:

        def step(x: torch.Tensor, causal: bool = causal) -> torch.Tensor:
            q, k, v = layer(x).chunk(3, -1)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            return (x + attended).float().square().mean()

        with sdpa_kernel(getattr(SDPBackend, f"{kernel.upper()}_ATTENTION")):
            flat = pfeife.capture(step, batch)
        targets = [str(node.target) for node in flat.module.graph.nodes]
        if not any(f"{kernel}_attention" in target for target in targets):
            raise Skipped(f"another kernel was chosen: {[t for t in targets if 'attention' in t]}")
        state = pfeife.state_of(flat, layer)
        wanted = values_of(pfeife.evaluate(flat, state, [batch]))
        local = pfeife.shard({}, members, prices=EVERYTHING, attention=how)(flat)  # type: ignore[arg-type]
        if not collectives(local)["shift" if how == "ring" else "reduce_scatter"]:
            raise Wrong("the sequence is not cut", **collectives(local))
        found = values_of(pfeife.evaluate(local, state, [batch]))
        told = alike(found, wanted, CUT if dtype == torch.float32 else HALVES)
        kind = "causal" if causal else "all"
        figures[f"{kind}, {members} members, {how}"] = told["largest difference"]
    return figures


def in_halves(setting: Setting) -> dict[str, Any]:
    """A GPT in bfloat16, by a GPU's kernels and prices."""
    torch.manual_seed(0)
    sizes = (32, 2, 50, 16, 4) if setting.small else (512, 4, 1000, 512, 8)
    model = GPT(*sizes).to(setting.device, torch.bfloat16)
    words = torch.randint(sizes[2], (2, 4, sizes[3]), device=setting.device)
    case = Large(model, functools.partial(words_loss, model), [tuple(words)])
    flat = pfeife.capture(case.step, *case.microbatches[0])
    state, figures = pfeife.state_of(flat, model), {}
    wanted = values_of(pfeife.evaluate(flat, state, case.microbatches))
    prices = member_prices(default_machine(torch.device(setting.device)))
    for members in (2, 4):
        local = pfeife.shard("cut", members, prices=prices)(flat)
        told = alike(values_of(pfeife.evaluate(local, state, case.microbatches)), wanted, HALVES)
        figures |= {f"{members} members: {name}": value for name, value in told.items()}
    return figures


def experts(first: int, second: int, setting: Setting) -> dict[str, Any]:
    """Grouped products of experts, whose matrices are cut along some dimensions."""
    torch.manual_seed(0)
    device = setting.device
    shapes = (4, 32, 64), (4, 64, 32)
    layers = nn.ParameterList((torch.randn(shape) / 4).bfloat16().to(device) for shape in shapes)
    ends = torch.tensor([5, 5, 7, 16], dtype=torch.int32, device=device)
    batch = torch.randn(16, 32, device=device).bfloat16(), ends

    def step(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        h = F.grouped_mm(x, layers[0], offs=ends).relu()
        return F.grouped_mm(h, layers[1], offs=ends).float().square().mean()

    flat = pfeife.capture(step, *batch)
    names = [port.fqn for port in flat.ports(pfeife.Role.PARAMETER)]
    state = dict(zip(names, (layer.detach() for layer in layers), strict=True))
    local = pfeife.shard({names[0]: first, names[1]: second}, 2)(flat)
    wanted = values_of(pfeife.evaluate(flat, state, [batch]))
    return alike(values_of(pfeife.evaluate(local, state, [batch])), wanted, HALVES)


def _row(name: str, members: int, everything: bool) -> Row:
    how = "everything cut" if everything else "cut"
    return Row(f"{name} {how} over {members}", functools.partial(cut, name, members, everything))


ROWS = [
    *(
        Row(
            f"{kernel} attention in {dtype}",
            functools.partial(attention, kernel, dtype),
            cuda=kernel != "flash",
        )
        for kernel, dtype in (
            *(("cudnn", torch.bfloat16), ("flash", torch.bfloat16)),
            *(("efficient", torch.bfloat16), ("efficient", torch.float32)),
        )
    ),
    Row("GPT in bfloat16", in_halves),
    Row("experts by columns and rows", functools.partial(experts, 2, 1)),
    Row("experts over members", functools.partial(experts, 0, 0)),
    *(
        _row(name, members, everything)
        for name, members, everything in (
            *(("GPT", 2, False), ("GPT", 4, True), ("tied", 2, True), ("dropout", 2, True)),
            ("UNet", 2, False),
        )
    ),
]
