"""What members tell one another, under way beside what they compute."""

from itertools import chain

import attrs
import pytest
import torch
import torch.nn.functional as F
from decisions import CPU_CORE
from sent import DEAR_TO_COMPUTE
from torch import nn

import pfeife
from pfeife import sched
from pfeife.compilers.draws import around_draws
from pfeife.cost import estimate, member_prices, memory_curves, timing_of
from pfeife.cost.body import Body
from pfeife.cost.estimate import sending_seconds, telling_seconds
from pfeife.ir.members import LASTING, all_gather, all_reduce, arrived, begins, shift
from pfeife.ir.nodes import returned, value_of
from pfeife.testing import check_pass

aten = torch.ops.aten
COLUMNS_THEN_ROWS = {"*.up.*": 0, "*.down.weight": 1}


class Layer(nn.Module):
    """Two products and what comes past them."""

    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def ranks_of(placements, members=2, rows=4, normed=False):
    """The program of the ranks of three layers, and its state."""
    torch.manual_seed(0)
    layers = [[Layer(), *([nn.LayerNorm(16)] if normed else [])] for _ in range(3)]
    net = nn.Sequential(*chain(*layers))
    flat = pfeife.capture(lambda x: net(x).square().mean(), torch.randn(rows, 16))
    prices = member_prices(CPU_CORE)
    sharded = pfeife.shard(placements, members, unknown="gather", prices=prices)
    clusters = pfeife.compose(sharded, pfeife.fuse())(flat)
    clusters = pfeife.annotate(estimate(clusters, CPU_CORE))(clusters)
    plan = pfeife.Plan((0,) * clusters.units, sched.policy("gpipe")(1, 2))
    return pfeife.apply(plan)(clusters), pfeife.state_of(flat, net)


def begun_in(body):
    """The collectives that are under way for a while, with the nodes meanwhile."""
    nodes = [*body.graph.nodes]
    spans = {}
    for over in (node for node in nodes if node.target is arrived):
        begun = over.args[0]
        assert begins(begun) and begun.target in LASTING and over.args[1:] == begun.args[:1]
        spans[begun] = nodes[nodes.index(begun) + 1 : nodes.index(over)]
    return spans


@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize("placements", [COLUMNS_THEN_ROWS, {"*.weight": 0}, "auto"])
@pytest.mark.parametrize("bandwidth", [1e4, 1e8, 1e12])
def test_the_values_are_the_same_ones(members, placements, bandwidth):
    ranks, state = ranks_of(placements, members)
    timing = timing_of(attrs.evolve(CPU_CORE, link_bandwidth=bandwidth))
    beside = pfeife.overlap(timing)
    result = check_pass(beside, ranks, state, [torch.randn(4, 16), torch.randn(4, 16)])
    assert [*map(len, map(begun_in, beside(result).bodies.values()))] == [
        *map(len, map(begun_in, result.bodies.values()))
    ]
    for body in result.bodies.values():
        under_way = 0
        for node in body.graph.nodes:
            under_way += (node.target in LASTING and begins(node)) - (node.target is arrived)
            assert under_way <= 2


def test_a_sum_goes_out_before_the_gradients_of_weights():
    """As in Megatron's column-parallel linear layer: while the gradient of a layer's input is added
    up, those of its weights are computed."""
    ranks, _ = ranks_of(COLUMNS_THEN_ROWS)
    (body,) = (b for at, b in ranks.bodies.items() if "backward" in at)
    assert not begun_in(body)
    changed = pfeife.overlap(timing_of(CPU_CORE))(ranks)
    (body,) = (b for at, b in changed.bodies.items() if "backward" in at)
    spans = begun_in(body)
    assert {begun.target for begun in spans} == {all_reduce} and len(spans) == 2
    for meanwhile in spans.values():
        assert [node.target for node in meanwhile].count(aten.mm.default) >= 1


def test_a_parameter_is_gathered_while_the_one_before_is_used():
    ranks, _ = ranks_of({"*.weight": 0}, rows=1024)
    slow = attrs.evolve(CPU_CORE, link_latency=1e-2)
    changed = pfeife.overlap(timing_of(slow))(ranks)
    (body,) = (b for at, b in changed.bodies.items() if "forward" in at)
    spans = begun_in(body)
    assert {begun.target for begun in spans} == {all_gather} and len(spans) == 5  # but the first
    for meanwhile in spans.values():
        products = [node for node in meanwhile if node.target is aten.addmm.default]
        assert len(products) == 1


class Attention(nn.Module):
    """Of one head, so that its sequence is cut."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        heads = [each.unsqueeze(1) for each in self.qkv(x).chunk(3, -1)]
        return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).squeeze(1))


def test_keys_go_around_while_attention_is_computed():
    """And no member has those of more than two others at once."""
    torch.manual_seed(0)
    net, x = nn.Sequential(Attention(), Attention()), torch.randn(1, 16, 16)
    flat = pfeife.capture(lambda x: net(x).square().mean(), x)
    ring = pfeife.shard({}, 4, attention="ring", prices=DEAR_TO_COMPUTE)
    clusters = pfeife.compose(ring, pfeife.fuse())(flat)
    clusters = pfeife.annotate(estimate(clusters, CPU_CORE))(clusters)
    plan = pfeife.Plan((0,) * clusters.units, sched.policy("gpipe")(1, 2))
    ranks = pfeife.apply(plan)(clusters)
    beside = pfeife.overlap(timing_of(CPU_CORE))
    changed = check_pass(beside, ranks, pfeife.state_of(flat, net), [(x,), (x + 1,)])
    (body,) = (b for at, b in changed.bodies.items() if "forward" in at)
    spans = begun_in(body)
    assert [begun.target for begun in spans] == [shift] * 12  # three rounds of keys and of values
    keys = [meanwhile for begun, meanwhile in spans.items()][::2]
    for meanwhile in keys:
        assert any(node.name.startswith("_scaled_dot_product") for node in meanwhile)
    both = zip(memory_of(ranks, plan), memory_of(changed, plan), strict=True)
    part = 4 * 16 * 4  # bytes of keys, or values
    assert all(after <= before + 4 * part for before, after in both)


def memory_of(ranks, plan):
    """The peak of each rank by the account, in bytes."""
    return [curve.peak for curve in memory_curves(ranks, sched.lower(plan.schedule, ranks))]


def test_what_is_gathered_just_in_time():
    """A link so fast that nothing needs to begin before the product in front of it."""
    ranks, _ = ranks_of({"*.weight": 0}, rows=1024)
    fast = attrs.evolve(CPU_CORE, link_bandwidth=1e15, link_latency=0.0)
    changed = pfeife.overlap(timing_of(fast))(ranks)
    (body,) = (b for at, b in changed.bodies.items() if "forward" in at)
    for meanwhile in begun_in(body).values():
        assert aten.addmm.default not in [node.target for node in meanwhile]


def test_the_costs_are_less_by_what_is_hidden():
    """And no call takes less than what it computes, or than what it sends."""
    ranks, _ = ranks_of({"*.weight": 0}, rows=1024)
    for bandwidth in (1e6, 1e9):
        machine = attrs.evolve(CPU_CORE, link_bandwidth=bandwidth, link_latency=1e-6)
        priced = pfeife.annotate(estimate(ranks, machine))(ranks)
        changed = pfeife.overlap(timing_of(machine))(priced)
        again = estimate(changed, machine).seconds
        timing = timing_of(machine)
        for before, call in zip(priced.calls, changed.calls, strict=True):
            assert call.seconds == pytest.approx(again[call.node])
            assert call.seconds < before.seconds
            nodes = [*changed.body(call).graph.nodes]
            computing = sum(map(timing.computing, nodes))
            sending = sum(map(timing.sending, nodes))
            assert max(computing, sending) <= call.seconds * (1 + 1e-9)
            assert before.seconds == pytest.approx(computing + sending)


def test_a_machine_that_hides_a_part():
    """Of what is sent it is kept busy by the rest; without collectives nothing is waited for, to
    the bit."""
    ranks, _ = ranks_of({"*.weight": 0}, rows=1024)
    taken = []
    for hidden in (1.0, 0.5):
        machine = attrs.evolve(CPU_CORE, overlap=hidden)
        changed = pfeife.overlap(timing_of(machine))(ranks)
        taken.append(sum(call.seconds for call in changed.calls))
    assert taken[0] < taken[1] < sum(call.seconds for call in ranks.calls)
    alone = pfeife.fuse()(pfeife.capture(lambda x: (x.exp() / 3).sin().mean(), torch.ones(7)))
    for body in alone.bodies.values():
        assert sending_seconds(body, CPU_CORE) == telling_seconds(body, CPU_CORE) == 0.0


def test_nothing_changes_where_nothing_is_hidden():
    ranks, _ = ranks_of(COLUMNS_THEN_ROWS)
    busy = attrs.evolve(CPU_CORE, overlap=0.0)
    assert pfeife.overlap(timing_of(busy))(ranks) is ranks
    alone = pfeife.capture(lambda x: x.square().mean(), torch.ones(2))
    assert pfeife.overlap(timing_of(CPU_CORE))(alone) is alone


def test_pieces_for_a_compiler_stay_on_their_side():
    """What is computed while a collective is under way is a piece behind its beginning, and each
    piece is of tensors alone."""
    ranks, _ = ranks_of(COLUMNS_THEN_ROWS, normed=True)
    changed = pfeife.overlap(timing_of(CPU_CORE))(ranks)
    (body,) = (b for at, b in changed.bodies.items() if "backward" in at)
    pieces = []
    spans = begun_in(around_draws(body, lambda piece: pieces.append(piece) or piece))
    assert len(spans) == 2
    for meanwhile in spans.values():
        assert any(node.op == "call_module" for node in meanwhile)
    for piece in pieces:
        values = [*returned(piece), *(n for n in piece.graph.nodes if n.op == "placeholder")]
        assert all(value_of(node) is not None for node in values)


def test_whoever_reads_a_collective_itself_has_it_where_it_is():
    """As a pass may make of it: then nothing is under way, neither in time nor in memory."""
    ranks, _ = ranks_of({"*.weight": 0}, rows=1024)
    timing = timing_of(CPU_CORE)
    (body,) = (b for at, b in ranks.bodies.items() if "forward" in at)
    (changed,) = (b for at, b in pfeife.overlap(timing)(ranks).bodies.items() if "forward" in at)
    for over in [node for node in changed.graph.nodes if node.target is arrived]:
        reader = next(user for user in over.users if user.op != "output")
        reader.replace_input_with(over, over.args[0])
    assert not any(map(begins, changed.graph.nodes))
    assert timing.seconds(changed) == pytest.approx(timing.seconds(body))
    assert Body.of(changed).peak >= Body.of(body).peak
