"""The attention of a CPU as CUDA's: against torch's own derivatives of CUDA's operations, which run
on fake tensors, and against the numbers of the CPU, by the formulas of the kernels."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils import _pytree as pytree

import pfeife

ATEN = torch.ops.aten
FLASH, EFFICIENT = (
    ATEN._scaled_dot_product_flash_attention,
    ATEN._scaled_dot_product_efficient_attention,
)


def of_torch(query, key, value, mask, causal, scale):
    return F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale)


def flash(query, key, value, mask, causal, scale):
    assert mask is None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return FLASH(query, key, value, 0.0, causal, scale=scale)[0]


def efficient(query, key, value, mask, causal, scale):
    if mask is not None:
        row = mask.shape[-1]
        if row % 8:  # as torch does: rows are aligned
            mask = ATEN.slice.Tensor(F.pad(mask, [0, 8 - row % 8]), -1, 0, row)
        mask = mask.expand(*query.shape[:3], key.shape[2])
    return EFFICIENT(query, key, value, mask, True, 0.0, causal, scale=scale)[0]


class Attending(nn.Module):
    """Two layers of attention, of which the second one has other queries than keys."""

    def __init__(self, attend, heads=2, width=16, causal=False, scale=None):
        super().__init__()
        self.attend, self.heads, self.causal, self.scale = attend, heads, causal, scale
        self.first, self.second = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)

    def forward(self, x, mask=None):
        x = self.layer(self.first, x, x, mask)
        return self.layer(self.second, x[:, :3], x, mask if mask is None else mask[..., :3, :])

    def layer(self, linear, ask, x, mask):
        split = x.shape[0], -1, self.heads, x.shape[2] // self.heads
        (query, _, _), (_, key, value) = (
            (one.view(split).transpose(1, 2) for one in linear(of).chunk(3, -1)) for of in (ask, x)
        )
        causal = self.causal and ask is x
        made = self.attend(query, key, value, mask, causal, self.scale)
        return made.transpose(1, 2).reshape(ask.shape)


def captured(attend, rows, **how):
    torch.manual_seed(0)
    net = Attending(attend, **how).to(rows[0].dtype)
    step = functools.partial(lambda *rows: net(*rows).square().mean())
    return net, pfeife.capture(step, *rows, loss_reduction="mean")


def given(dtype, mask=None, length=5):
    torch.manual_seed(1)
    return (torch.randn(2, length, 16).to(dtype), *(() if mask is None else (mask.to(dtype),)))


def wave(*sizes):
    return torch.arange(float(torch.Size(sizes).numel())).reshape(sizes).sin()


HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
CASES = {
    "flash": (flash, given(BRAIN), {}),
    "flash, causal": (flash, given(HALF), {"causal": True, "scale": 0.3}),
    "efficient": (efficient, given(FULL), {"scale": 0.3}),
    "efficient, causal": (efficient, given(FULL), {"causal": True}),
    "a mask of all heads": (efficient, given(FULL, wave(2, 1, 5, 5)), {}),
    "a mask of each head": (efficient, given(HALF, wave(2, 2, 5, 5)), {}),
    "rows that are aligned": (efficient, given(FULL, wave(8, 8), 8), {}),
}


def layout(value):
    return [
        (tuple(one.shape), one.dtype, one.stride(), str(one.device))
        if isinstance(one, torch.Tensor)
        else one
        for one in pytree.tree_leaves(value)
    ]


def whole(node):
    """All that an operation is given, by name."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.args, node.kwargs
    arguments = node.target._schema.arguments
    found = {one.name: one.default_value for one in arguments if one.has_default_value()}
    found |= dict(zip((one.name for one in arguments), node.args, strict=False)) | node.kwargs
    return sorted(found.items())


def lines(program):
    """What makes each output: operations, arguments and values, whatever the nodes' names are."""
    known, told = {}, []

    def tell(node):
        if node not in known:
            read = str(fx.node.map_arg(whole(node), tell))
            name = node.name if node.op == "placeholder" else ""
            known[node] = len(known)
            told.append((name or str(node.target), read, layout(node.meta.get("val"))))
        return known[node]

    (end,) = [node for node in program.module.graph.nodes if node.op == "output"]
    fx.node.map_arg(end.args, tell)
    return told


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_torch_makes_of_cudas_operation(name):
    """Torch's own derivatives of CUDA's operations say what a backward reads; a capture with these
    runs on no CPU, but it is traced there."""
    attend, rows, how = CASES[name]
    moved, other = (
        pfeife.move_to_device("cuda")(captured(one, rows, **how)[1]) for one in (of_torch, attend)
    )
    assert sum("attention" in str(node.target) for node in moved.module.graph.nodes) == 4
    assert lines(moved) == lines(other)


def scores(query, key, bias, causal, scale):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    found = query.double() @ key.double().transpose(2, 3) * scale
    found = found if bias is None else found + bias
    later = torch.ones(found.shape[2:], dtype=torch.bool).triu(1)
    return found.masked_fill(later, -torch.inf) if causal else found, scale


def forward(query, key, value, bias, causal, scale, padded):
    found, _ = scores(query, key, bias, causal, scale)
    sums = F.pad(found.logsumexp(-1), (0, padded), value=torch.inf).float()
    return (found.softmax(-1) @ value.double()).to(query.dtype), sums


def backward(above, query, key, value, bias, out, sums, causal, scale):
    """Dao et al., FlashAttention, 2022, algorithm 4."""
    found, scale = scores(query, key, bias, causal, scale)
    weights = (found - sums[:, :, : query.shape[2], None]).exp()
    above, wide = above.double(), (query.double(), key.double(), value.double())
    inner = (above * out).sum(-1, keepdim=True)
    steps = weights * (above @ wide[2].transpose(2, 3) - inner) * scale
    grads = steps @ wide[1], steps.transpose(2, 3) @ wide[0], weights.transpose(2, 3) @ above
    return [grad.to(query.dtype) for grad in grads]


def flash_of(query, key, value, dropout, causal, debug, *, scale):
    made = forward(query, key, value, None, causal, scale, 0)
    return *made, None, None, query.shape[2], key.shape[2], torch.zeros(2), torch.zeros(()), None


def flash_back(
    above, q, k, v, out, sums, no, none, most_q, most_k, drop, causal, seed, at, *, scale
):
    assert (most_q, most_k) == (q.shape[2], k.shape[2]) and (seed.dim(), at.dim()) == (1, 0)
    return backward(above, q, k, v, None, out, sums, causal, scale)


def efficient_of(query, key, value, bias, sums, dropout, causal, *, scale=None):
    assert sums and (bias is None or bias.shape[:2] == query.shape[:2])
    made = forward(query, key, value, bias, causal, scale, -query.shape[2] % 32)
    return *made, torch.zeros(()), torch.zeros(())


def efficient_back(
    above, q, k, v, bias, out, sums, seed, at, dropout, wanted, causal, *, scale=None
):
    return *backward(above, q, k, v, bias, out, sums, causal, scale), None


FORMULAS = {
    FLASH.default: flash_of,
    EFFICIENT.default: efficient_of,
    ATEN._scaled_dot_product_flash_attention_backward.default: flash_back,
    ATEN._scaled_dot_product_efficient_attention_backward.default: efficient_back,
}


def by_formulas(program):
    """A program of a GPU that runs on a CPU, its attention in float64."""

    def edit(module):
        for node in module.graph.nodes:
            node.target = FORMULAS.get(node.target, node.target)

    return pfeife.move_to_device("cpu")(program.edit(edit))


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_of_the_cpu(name):
    """Bits cannot be compared: CUDA's kernels do not run here. What they are given can be, by the
    formulas that they compute: another scale, mask or order would be seen."""
    _, rows, how = CASES[name]
    net, flat = captured(of_torch, rows, **how)
    state = pfeife.state_of(flat, net)
    there = by_formulas(pfeife.move_to_device("cuda")(flat))
    wanted, found = (pfeife.evaluate(one, state, [rows]) for one in (flat, there))
    bound = {FULL: 1e-5, HALF: 5e-3, BRAIN: 4e-2}[rows[0].dtype]
    for at, gradient in wanted.gradients.items():
        error = (found.gradients[at] - gradient).double().norm() / gradient.double().norm()
        assert error < bound, (at, error)


def test_a_program_of_attention_is_planned_as_any_other():
    rows = CASES["a mask of all heads"][1]
    there = pfeife.move_to_device("cuda")(captured(of_torch, rows)[1])
    found = pfeife.forecast(there, machine="h100-sxm", ranks=2, microbatches=4)
    assert found.forecast.step_seconds > 0
    with pytest.raises(ValueError, match=r"another body: .*before `fuse`.*test_moved_att"):
        pfeife.move_to_device("cuda")(pfeife.fuse()(captured(of_torch, rows)[1]))


REFUSED = {
    "float64": (given(torch.float64), {}),
    "heads of 2 numbers": (given(FULL), {"heads": 8}),
    "pads to a multiple of 8": (given(BRAIN), {"heads": 4}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cuda_has_no_kernel_for_is_refused(why):
    rows, how = REFUSED[why]
    with pytest.raises(ValueError, match=rf"{why}.*test_moved_attention.*MATH"):
        pfeife.move_to_device("cuda")(captured(of_torch, rows, **how)[1])
