"""Estimates: rooflines by hand, and the FLOPs of operations."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import CPU_CORE, fused
from torch import nn

import pfeife
from pfeife.cost import estimate
from pfeife.cost.estimate import node_seconds
from pfeife.data.machine import Machine
from pfeife.ir.flops import node_flops

aten = torch.ops.aten


def test_estimates_by_dtype():
    """The same products take what the machine needs in their own dtype, forward and backward."""

    def program(dtype: torch.dtype) -> pfeife.Program:
        weight = nn.Parameter(torch.randn(8, 8, dtype=dtype))
        step = pfeife.capture(lambda x: (x @ weight).float().sum(), torch.randn(4, 8, dtype=dtype))
        return pfeife.fuse()(step)

    rates = {"float32": 4.0, "bfloat16": 16.0, "float64": 1.0}
    slow = Machine("slow", rates, memory_bandwidth=1e30, memory=1, link_bandwidth=1.0)
    totals = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        made = program(dtype)
        nodes = [node for call in made.calls for node in made.body(call).graph.nodes]
        products = [node for node in nodes if node_flops(node)]
        assert len(products) == 2
        for node in products:
            seconds = node_flops(node) / slow.flops_of(dtype)
            assert node_seconds(node, slow) == pytest.approx(seconds)
        totals[dtype] = sum(estimate(made, slow).seconds.values())
    assert totals[torch.float64] == pytest.approx(4 * totals[torch.float32])
    assert totals[torch.float32] == pytest.approx(4 * totals[torch.bfloat16])
    assert totals[torch.float16] == pytest.approx(totals[torch.float32])


# Rates at which a second is easily counted: an operation a second, eight bytes a second.
SLOW = Machine("slow", flops=1.0, memory_bandwidth=8.0, memory=1, link_bandwidth=1.0)


def nodes_of(step, *batch: torch.Tensor) -> list[torch.fx.Node]:
    program = pfeife.fuse()(pfeife.capture(step, *batch))
    return [node for call in program.calls for node in program.body(call).graph.nodes]


def flops_by_operation(nodes: list[torch.fx.Node]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for node in nodes:
        if node_flops(node):
            found.setdefault(str(node.target), []).append(node_flops(node))
    return found


@settings(max_examples=10)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(2, 6))
def test_flops_of_a_matmul(m, n, k):
    """2 m n k forward; the same again for each gradient that is wanted."""
    weight, other = nn.Parameter(torch.randn(k, n)), nn.Parameter(torch.randn(n, 2))

    def step(x):
        return (x @ weight @ other).square().sum()

    found = flops_by_operation(nodes_of(step, torch.randn(m, k)))
    first, second = 2 * m * n * k, 2 * m * 2 * n
    assert sorted(found.pop("aten.mm.default")) == sorted([first] * 2 + [second] * 3)
    assert not found, "nothing else has a formula"


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_attention_on_the_cpu_has_flops(dropout):
    """torch's table knows the GPU kernels alone; with dropout the kernel is a random operation."""
    project = nn.Linear(4, 12)

    def step(x):
        q, k, v = project(x).view(2, 5, 2, 6).transpose(1, 2).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).square().sum()

    nodes = nodes_of(step, torch.randn(2, 5, 4))
    products = [aten.mm, aten.addmm, aten.bmm, aten.matmul]
    attention = [
        node
        for node in nodes
        if node_flops(node) and getattr(node.target, "overloadpacket", None) not in products
    ]
    small = 2 * 2 * 2 * (5 * 2 * 5)  # both products of attention, over 2 rows and 2 heads
    if attention:
        assert node_flops(attention[0]) == 2 * small
        assert len(attention) == 2 and node_flops(attention[1]) > 2 * small
        assert all(node_seconds(node, SLOW) >= node_flops(node) for node in attention)
    else:  # spelt out as two batched products
        assert sum(flops_by_operation(nodes)["aten.bmm.default"]) >= 6 * small


def test_flops_of_a_convolution():
    conv = nn.Conv2d(3, 5, 3)
    found = flops_by_operation(nodes_of(lambda x: conv(x).sum(), torch.randn(2, 3, 6, 6)))
    assert found["aten.convolution.default"] == [2 * 2 * 16 * 3 * 5 * 9]
    assert set(found) == {"aten.convolution.default", "aten.convolution_backward.default"}


def test_flops_of_products_by_groups():
    """Two for each row and column of its group's matrix, and twice as many backward, even if the
    groups are of different sizes."""
    matrices = nn.Parameter(torch.randn(3, 16, 8, dtype=torch.bfloat16))
    ends = torch.tensor([1, 6, 10], dtype=torch.int32)

    def step(x):
        return torch.nn.functional.grouped_mm(x * 2, matrices, offs=ends).float().sum()

    rows = torch.randn(10, 16, dtype=torch.bfloat16, requires_grad=True)
    found = flops_by_operation(nodes_of(step, rows))
    assert found == {"aten._grouped_mm.default": [2 * 10 * 16 * 8] * 3}


def test_roofline_by_hand():
    """An operation takes the longer of computing and moving its bytes, and a launch."""
    weight = nn.Parameter(torch.randn(5, 7))
    (product,) = (
        node
        for node in nodes_of(lambda x: (x @ weight).sum(), torch.randn(3, 5))
        if node.target == aten.mm.default and node.meta["val"].shape == (3, 7)
    )
    moved = 4 * (3 * 5 + 5 * 7 + 3 * 7)
    assert node_seconds(product, SLOW) == 210
    assert node_seconds(product, attrs.evolve(SLOW, flops=1e9)) == moved / 8
    late = attrs.evolve(SLOW, launch_seconds=1.0)
    assert node_seconds(product, late) == 211


@pytest.mark.parametrize("name", ["GPT", "UNet", "DropoutNet"])
def test_estimates(name):
    """Every call has seconds, the sum of its nodes'; views and placeholders cost nothing."""
    program = fused(name)
    costs = estimate(program, CPU_CORE)
    assert set(costs.seconds) == {call.node for call in program.calls}
    assert all(seconds > 0 for seconds in costs.seconds.values())
    assert costs == estimate(program, CPU_CORE)
    for call in program.calls:
        nodes = list(program.body(call).graph.nodes)
        assert costs.seconds[call.node] == pytest.approx(
            sum(node_seconds(n, CPU_CORE) for n in nodes)
        )
        for node in nodes:
            free = node.op != "call_function" or node.target in (
                *(aten.view.default, aten.reshape.default, aten.t.default, aten.transpose.int),
                *(aten.split.Tensor, aten.expand.default, aten.detach.default),
            )
            assert not free or node_seconds(node, CPU_CORE) == 0.0, node.format_node()


def test_members_wait_for_one_another():
    """A layer by columns and one by rows: one sum over the members each way."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    flat = pfeife.capture(lambda x: net(x).square().mean(), torch.ones(1, 8, requires_grad=True))
    local = pfeife.fuse()(pfeife.shard({"0.*": 0, "1.weight": 1}, 2)(flat))
    slow = attrs.evolve(CPU_CORE, link_latency=1.0, link_bandwidth=64.0)
    without = attrs.evolve(CPU_CORE, link_latency=0.0, link_bandwidth=1e30)
    seconds = [sum(estimate(local, each).seconds.values()) for each in (slow, without)]
    # of the other one 8 floats: a second, and 32 bytes at 64 a second
    assert seconds[0] - seconds[1] == pytest.approx(2 * (1.0 + 0.5))
