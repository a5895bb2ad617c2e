"""Programs captured on the CPU as those of a GPU that is not there."""

import contextlib

import programs
import pytest
import torch
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

import pfeife

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@contextlib.contextmanager
def without_mkldnn():
    torch.backends.mkldnn.set_flags(False)
    yield
    torch.backends.mkldnn.set_flags(True)


def by_matrices():
    return sdpa_kernel(SDPBackend.MATH)


def captured(step, *microbatch):
    return pfeife.capture(step, *microbatch, loss_reduction="mean")


def moved(program, device=CUDA):
    return pfeife.move_to_device(device)(program)


def layouts(program):
    """Of every value in every graph: its shape, dtype, strides and device."""
    return {
        (at, node.name): [
            (one.shape, one.dtype, one.stride() if one.layout == torch.strided else (), one.device)
            for one in pytree.tree_leaves(node.meta["val"])
            if isinstance(one, torch.Tensor)
        ]
        for at, module in program.module.named_modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function" and node.users and "val" in node.meta
    }


def told_by_torch(program):
    """The same program, whose values torch's own rules tell anew from its inputs."""

    def forget(module):
        for node in module.graph.nodes:
            if node.op == "call_function":
                node.meta = {name: one for name, one in node.meta.items() if name != "val"}

    for of in ("bodies", "calls") if program.calls else ("bodies",):
        program = program.edit(forget, of=of)
    return program


def mixed():
    """A step in which autocast makes copies, and what it is called with."""
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            return net(x).float().square().mean()

    return step, torch.randn(2, 4)


def held():
    """A step with tensors that it holds by value, and a sparse gradient."""
    net, scale = nn.Embedding(5, 3, sparse=True), torch.tensor([1.0, 2.0, 3.0])

    def step(x):
        found = net(x) * scale * torch.tensor([0.5, 1.0, 2.0])
        return found.mean() * torch.tensor(2.0)

    return step, torch.tensor([[1, 2], [3, 4]])


STEPS = {"autocast": mixed, "held": held}


@pytest.mark.parametrize("name", ["GPT", "BatchNormNet", "DropoutNet", *STEPS])
def test_every_value_is_where_torch_says(name):
    flat = captured(*STEPS[name]()) if name in STEPS else programs.captured(name)[1]
    fused = pfeife.fuse()(flat)
    for program in (flat, fused):
        there = moved(program)
        assert layouts(there) == layouts(told_by_torch(there))
        for port in there.ports(*pfeife.Role):  # the CPU reads seeds
            assert port.device == (CPU if port.role == pfeife.Role.SEED else CUDA)
        back = moved(there, "cpu")
        assert layouts(program).items() <= layouts(back).items() and moved(program, CPU) is program
    if name != "held":  # the copies of what is held stand between calls there
        assert str(moved(fused)) == str(pfeife.fuse()(moved(flat))) and str(back) == str(fused)


def test_a_value_may_be_another_one_there():
    there = moved(captured(*mixed()))
    (norm,) = [n for n in there.module.graph.nodes if "layer_norm.default" in str(n.target)]
    assert norm.meta["val"][1].dtype == torch.float32  # the mean is bfloat16 on a CPU


def test_what_data_size_moves_too():
    there = moved(captured(lambda x: x[x > 0].mean(), torch.randn(3, 2)))
    values = [node.meta.get("val") for node in there.module.graph.nodes]
    assert {one.device for one in values if isinstance(one, torch.Tensor)} == {CUDA}
    assert moved(moved(there, "cuda:1"), "cuda") is not there


def test_what_is_on_the_cpu_beside_a_gpu_stays():
    flat = captured(*held())
    first, there = moved(flat), moved(moved(flat), "cuda:1")
    assert str(there).replace("index=1", "index=0").replace("cuda:1", "cuda:0") == str(first)
    constants = [node for node in there.module.graph.nodes if node.op == "get_attr"]
    assert constants and {node.meta["val"].device for node in constants} == {CPU}


def attention():
    net = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)
    return lambda x: net(x).square().mean(), torch.randn(2, 3, 6)


def lstm():
    net = nn.LSTM(4, 4)
    return lambda x: net(x)[0].square().mean(), torch.randn(3, 2, 4)


@pytest.mark.parametrize("step, without", [(attention, by_matrices), (lstm, without_mkldnn)])
def test_what_only_the_cpu_has_is_refused_with_its_line(step, without):
    called = step()
    with pytest.raises(
        ValueError, match=r"(no multiple of 4|mkldnn).* \(File .*test_move.*capture"
    ):
        moved(captured(*called))
    with without():
        moved(captured(*called))


@pytest.fixture
def operators():
    """Custom operators by where they run, as three kinds of libraries define them."""
    mine = torch.library.Library("moved", "DEF")
    kernel = lambda x: x + 1  # noqa: E731
    for name, *keys in (
        ("here", "CPU"),
        ("both", "CPU", "CUDA"),
        ("anywhere", "CompositeExplicitAutograd"),
        ("made_of_others", "CompositeImplicitAutograd"),
    ):
        mine.define(f"{name}(Tensor x) -> Tensor")
        for key in (*keys, *(() if "Implicit" in keys[0] else ("Meta",))):
            mine.impl(name, kernel, key)
    yield torch.ops.moved
    mine._destroy()


def test_a_custom_operator_of_the_cpu_alone_is_refused_with_its_line(operators):
    def step(operation):
        return lambda x: operation(x).square().mean()

    for name in ("both", "anywhere", "made_of_others"):
        moved(captured(step(getattr(operators, name).default), torch.randn(2, 3)))
    here = captured(step(operators.here.default), torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"moved.here.* cuda \(File .*test_move.*register_kernel"):
        moved(here)


def test_programs_of_several_devices_are_refused():
    fused = moved(pfeife.fuse()(programs.captured("GPT")[1]))
    plan = pfeife.Plan(
        tuple(int(at >= fused.units // 2) for at in range(fused.units)),
        pfeife.sched.families.one_f_one_b(2, 2),
    )
    placed = pfeife.place(["cuda:1", "cuda:0"])(pfeife.apply(plan)(fused))
    with pytest.raises(ValueError, match=r"several devices: .* is on cuda:0 .*cuda:1 \(File"):
        moved(placed, "cuda:2")
    with pytest.raises(ValueError, match="meta"):
        pfeife.move_to_device("meta")
