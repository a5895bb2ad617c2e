"""The account of bytes: by hand, and that of every stage and rank."""

import functools

import attrs
import pytest
import torch
from models import CASES, case
from programs import CPU_CORE, annotated, clusters, for_ranks
from torch import nn

import pfeife
from pfeife import sched
from pfeife.cost import estimate, memory_curves, stage_memory
from pfeife.data.optimizers import optimizer_bytes
from pfeife.ir.parts import Kind, Role
from pfeife.lowering.channel import AHEAD
from pfeife.sched.cutting import clusters_of, workload_of
from pfeife.sched.cutting.account import Account, units_of

POLICIES = {"gpipe": sched.families.gpipe, "1f1b": sched.families.one_f_one_b}


# Two matrices, one a rank. In bytes: 3 x 5 floats of a batch, 3 x 7 of what crosses, both ways.
BATCH, FIRST, SECOND, CROSSING, PRODUCT = 60, 140, 56, 84, 24


@functools.cache
def two_matrices(width: int = 7) -> pfeife.Program:
    first, second = nn.Parameter(torch.randn(5, width)), nn.Parameter(torch.randn(width, 2))

    def step(x):
        return (pfeife.stage_boundary(x @ first) @ second).square().sum()

    return clusters(pfeife.capture(step, torch.randn(3, 5)))


def curves(policy: str, microbatches: int, width: int = 7, **options):
    plan = pfeife.Plan((0, 1), POLICIES[policy](2, microbatches))
    return memory_curves(*for_ranks(two_matrices(width), plan), **options)


def text_of(curve) -> list[tuple[str, int, int]]:
    return [(str(point.action), point.peak, point.after) for point in curve.points]


def test_temporaries_by_hand():
    """The first stage's most is its gradient; the second has both gradients and the square's."""
    plan = pfeife.Plan((0, 1), sched.families.gpipe(2, 1))
    memory = stage_memory(pfeife.partition(plan)(two_matrices()))
    assert [stage.temporaries for stage in memory] == [FIRST, SECOND + CROSSING + PRODUCT]
    assert [stage.parameters for stage in memory] == [FIRST, SECOND]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_microbatch_by_hand(policy):
    """From the first action on there is a buffer for the message that will arrive."""
    first, second = curves(policy, 1)
    c, loss = CROSSING, 4
    assert text_of(first) == [
        ("0F0", 2 * c, 2 * c),
        ("0SEND_F0", 2 * c, 2 * c),
        ("0RECV_B0", 2 * c, c),  # says that what was sent has arrived
        ("0B0", c + FIRST, FIRST),
    ]
    forward = PRODUCT + PRODUCT + loss  # the product, its square, the sum
    assert text_of(second) == [
        ("1RECV_F0", c, c),
        ("1F0", c + forward, c + PRODUCT + loss),  # the loss is cloned, its own is dropped
        ("1B0", c + PRODUCT + loss + SECOND + c + PRODUCT, loss + SECOND + c),
        ("1SEND_B0", loss + SECOND + c, loss + SECOND + c),  # nothing tells when it has arrived
    ]
    same = {"buffers": 0, "receive buffers": 0, "batch": BATCH}
    assert first.held == {"parameters": FIRST, **same}
    assert second.held == {"parameters": SECOND, **same}
    assert first.peak == FIRST + BATCH + c + FIRST
    assert first.at_peak == {"temporaries": FIRST, "received": c}


def test_a_reduced_gradient_is_there_once():
    """With replicas: it is reduced in a copy that they can cut in two, and then what was summed up
    goes. What arrives of the others has a buffer."""
    plan = pfeife.Plan((0, 1), sched.families.gpipe(2, 1))
    passes = [pfeife.partition(plan), pfeife.insert_send_recv(), pfeife.dp_wrap(pfeife.Mesh(2, 2))]
    sent = pfeife.compose(*passes)(two_matrices())
    first, _ = memory_curves(sent, sched.lower(plan.schedule, sent))
    copy = FIRST + 4
    assert text_of(first)[-1] == ("0REDUCE_GRAD", FIRST + copy, copy)
    assert first.held["receive buffers"] == copy
    assert first.held["batch"] == 2 * BATCH, "every rank is given the batch of all replicas"
    apart, _ = memory_curves(sent, sched.lower(plan.schedule, sent), apart=True)
    assert (apart.held["batch"], apart.points) == (BATCH, first.points)


def test_what_a_replica_does_not_own():
    """It sends its part of the gradient and keeps nothing, nor optimizer state; its buffer is for
    what it adds up. The account is that of the replica that owns most."""
    plan = pfeife.Plan((0, 1), sched.families.gpipe(2, 1))
    wrap = pfeife.dp_wrap(pfeife.Mesh(2, 2), pfeife.Replicas(2, "shard"))
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv(), wrap)(two_matrices())
    schedule = sched.lower(plan.schedule, sent)
    owns, not_ = (memory_curves(sent, schedule, optimizer=8, replica=k)[0] for k in range(2))
    assert (owns.held["optimizer"], not_.held["optimizer"]) == (2 * FIRST, 0)
    assert (owns.held["receive buffers"], not_.held["receive buffers"]) == (2 * FIRST, 0)
    assert text_of(owns)[-1] == ("0REDUCE_GRAD", 3 * FIRST, 2 * FIRST)
    assert text_of(not_)[-1] == ("0REDUCE_GRAD", 2 * FIRST, FIRST)
    assert memory_curves(sent, schedule, optimizer=8)[0] == owns


class Counting(nn.Module):
    """Every step adds its rows to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))
        self.register_buffer("total", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.sum(0))
        return pfeife.stage_boundary(x @ self.weight).square().sum()


def test_of_an_updated_buffer_the_last_value_stays():
    """A microbatch reads what the one before it left, which nobody needs afterwards."""
    fused = clusters(pfeife.capture(Counting(), torch.randn(3, 5)))
    for m in (1, 2, 8):
        first, _ = memory_curves(*for_ranks(fused, pfeife.Plan((0, 1), POLICIES["gpipe"](2, m))))
        assert first.points[-1].after == 5 * 5 * 4 + 5 * 4, "the gradient, and the buffer's value"


@pytest.mark.parametrize(("width", "ahead"), [(7, 64), (AHEAD // 24 + 1, 2), (AHEAD // 36, 3)])
def test_memory_grows_with_microbatches_in_gpipe(width, ahead):
    """All that was sent is kept until the first gradient is there; buffers for `ahead` messages,
    as many as fit but two at least, are there from the start, more when some have arrived. Those
    of large messages stay."""
    crossing = 3 * width * 4
    for m in range(2, 9):
        first, _ = curves("gpipe", m, width)
        points = {str(point.action): point for point in first.points}
        posted = m if width == 7 else 0  # beside those that stay
        again = ahead - 1  # so many have come when receives are posted again
        most = max(min(m, ahead), min(m, ahead + again) - again + 1)
        stay = 0 if width == 7 else most
        assert first.held["receive buffers"] == stay * crossing
        last = points[f"0F{m - 1}"]
        assert last.peak == last.after == (m + posted) * crossing
        assert points["0RECV_B0"].peak == (m + posted) * crossing
        assert points["0RECV_B0"].after == posted * crossing
        assert first.points[-1].after == 5 * width * 4, "only the gradient is left"
        assert first.held["batch"] == m * BATCH


def test_memory_is_bounded_in_1f1b():
    def most(m):
        large = curves("1f1b", m, AHEAD // 24 + 1)  # two messages ahead, however many there are
        return [max(point.peak for point in curve.points) for curve in large]

    for m in range(5, 9):
        # Of the later rank the losses alone are more.
        assert most(m)[0] == most(4)[0] and most(m)[1] - most(4)[1] <= 4 * (m - 4)


@pytest.mark.parametrize("policy", POLICIES)
def test_allocations_are_rounded_up_each(policy):
    """As if every tensor had 512 bytes: those of a body too, results and temporaries."""
    first, second = curves(policy, 1, rounding=512)
    c = 512
    expected = [(2 * c, 2 * c), (2 * c, 2 * c), (2 * c, c), (2 * c, c)]
    assert [point[1:] for point in text_of(first)] == expected
    assert [point[1:] for point in text_of(second)] == [
        (512, 512),
        (4 * 512, 3 * 512),  # received; product, its square, the sum
        (6 * 512, 3 * 512),  # received, product, loss; both gradients and the square's
        (3 * 512, 3 * 512),
    ]
    assert first.held["parameters"] == second.held["parameters"] == 512


@pytest.mark.parametrize(
    ("kind", "copies"), [(torch.optim.SGD, 0), (torch.optim.Adam, 2), (torch.optim.AdamW, 2)]
)
def test_optimizers_in_curves(kind, copies):
    real = kind([nn.Parameter(torch.randn(2))], lr=0.1)
    for optimizer in (kind, real):
        step = 4 if copies else 0
        held = [curve.held for curve in curves("gpipe", 2, optimizer=optimizer)]
        assert [one["optimizer"] for one in held] == [
            copies * FIRST + step,
            copies * SECOND + step,
        ]
        plain = [curve.peak for curve in curves("gpipe", 2)]
        more = [curve.peak for curve in curves("gpipe", 2, optimizer=optimizer)]
        assert [b - a for a, b in zip(plain, more, strict=True)] == [h["optimizer"] for h in held]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_peak_is_accounted_for(name, policy):
    """What `at_peak` names adds up to the highest point, and nothing is left but results."""
    fused = annotated(name)
    for split in (False, True):
        plan = sched.plan(
            fused, machine=CPU_CORE, microbatches=4, stages=4, ranks=2, schedule=policy
        )
        sent, schedule = for_ranks(fused, plan, split)
        for curve in memory_curves(sent, schedule):
            assert sum(curve.at_peak.values()) == max(point.peak for point in curve.points)
            assert all(size > 0 for size in curve.at_peak.values())
            assert tuple(point.action for point in curve.points) == schedule.ranks[curve.rank]
            assert all(point.peak >= point.after >= 0 for point in curve.points)


def staged(name: str, cuts: tuple[int, ...]) -> pfeife.Program:
    program = annotated(name)
    stage_of = tuple(sum(cut <= unit for cut in cuts) for unit in range(program.units))
    order = pfeife.sched.families.gpipe(len(cuts) + 1, 1)
    return pfeife.partition(pfeife.Plan(stage_of, order))(program)


def test_memory_by_hand():
    """The product is kept for its square's gradient; the batch is not the stage's."""
    weight = nn.Parameter(torch.randn(5, 7))
    program = pfeife.capture(lambda x: (x @ weight).square().sum(), torch.randn(3, 5))
    (memory,) = stage_memory(pfeife.fuse()(program))
    assert (memory.parameters, memory.saved) == (4 * 5 * 7, 4 * 3 * 7)


def test_memory_by_hand_of_two_stages():
    """What the later stage keeps of the earlier one's is its own; gradients are not kept."""
    first, second = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(7, 2))
    program = pfeife.capture(lambda x: (x @ first @ second).square().sum(), torch.randn(3, 5))
    program = pfeife.fuse()(program)
    assert program.units == 2
    before, after = stage_memory(program)
    assert (before.parameters, before.saved) == (4 * 5 * 7, 0)
    assert (after.parameters, after.saved) == (4 * 7 * 2, 4 * (3 * 7 + 3 * 2))


def test_memory_of_stages():
    """Every parameter is counted once, a tied one on each of its stages."""
    memory = stage_memory(staged("DropoutNet", (2,)))
    assert [stage.parameters for stage in memory] == [4 * 2 * (36 + 6)] * 2
    assert all(stage.saved > 0 for stage in memory)
    plain, tied = stage_memory(staged("GPT", (10,))), stage_memory(staged("TiedGPT", (10,)))
    table = 4 * 23 * 16  # the embedding, in the first stage and, as the head, in the last
    assert [stage.parameters for stage in tied] == [stage.parameters for stage in plain]
    everything = sum(p.nbytes for p in case("TiedGPT").model.parameters())
    assert sum(stage.parameters for stage in tied) == everything + table


def test_what_the_planner_knows_of_memory():
    """Clusters add up to the stages that they become: what these keep, each storage once."""
    program = annotated("UNet")
    work = workload_of(program)
    known, cuts = clusters_of(work), (3, 6)
    stages = [sum(cut <= unit for cut in cuts) for unit in range(program.units)]
    for units, stage in zip(units_of(stages, 3), stage_memory(staged("UNet", cuts)), strict=True):
        found = Account(work).held(units)
        assert found.state == 2 * stage.parameters, "as many bytes of gradients"
        assert found.late == stage.saved > 0
    plain, adam = (workload_of(program, optimizer=one).state for one in (None, "adamw"))
    kept = optimizer_bytes("adamw")
    ports = program.ports(Role.PARAMETER, Role.BUFFER)
    more = [kept(p.shape, p.dtype) if p.role == Role.PARAMETER else 0 for p in ports]
    assert [after[0] - before[0] for before, after in zip(plain, adam, strict=True)] == more
    assert len(known.ahead) == program.units and known.ahead[0] == known.back[0] == 0
    costs = estimate(program, CPU_CORE)
    both = sum(costs.seconds.values()) + sum(costs.accumulate.values())
    assert sum(known.seconds) == pytest.approx(both)


@pytest.mark.parametrize("split", [False, True])
def test_bytes_inside_of_operations_count_where_they_were_measured(split):
    """As on a GPU: those of a stage are the most of its clusters', on top of what the graph says,
    and a stage that recomputes has those of its forward too."""
    flat = annotated("GPT")
    costs = estimate(flat, CPU_CORE)
    first, last = flat.calls[0].node, flat.calls[-1].node
    inside = attrs.evolve(costs, inside={first: 1000, last: 3000})
    plain, more = (pfeife.annotate(one)(flat) for one in (costs, inside))
    assert {call.node: call.inside_bytes for call in more.calls if call.inside_bytes} == {
        first: 1000,
        last: 3000,
    }
    plan = sched.plan(plain, machine=CPU_CORE, microbatches=2, stages=1, schedule="1f1b")
    passes = [pfeife.partition(plan), *([pfeife.split_backward()] if split else [])]
    before, after = (pfeife.compose(*passes)(program) for program in (plain, more))
    of_kind = {call.kind: call.inside_bytes for call in after.calls}
    assert of_kind.pop(Kind.FORWARD) == 1000 and {*of_kind.values()} == {3000}
    (less,), (most,) = stage_memory(before), stage_memory(after)
    assert 1000 <= most.temporaries - less.temporaries <= 3000
    schedules = [sched.lower(plan.schedule, program) for program in (before, after)]
    (low,), (high,) = map(memory_curves, (before, after), schedules)
    assert low.peak < high.peak <= low.peak + 3000
    with pytest.raises(ValueError, match="no seconds"):
        attrs.evolve(costs, inside={"nowhere": 1})
