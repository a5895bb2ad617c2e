"""Every family of schedules against the formulas of its paper, and against torch's own."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import attrs
import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import lowered, unit
from share import some

from pfeife.data.schedule import SENDS, Action, Do, Schedule, parse_action
from pfeife.lowering.simulate import simulate
from pfeife.lowering.verify import verify_schedule
from pfeife.sched import POLICIES, policy
from pfeife.sched.by_family import in_flight
from pfeife.sched.families import (
    eager_one_f_one_b,
    folded,
    forward_only,
    gpipe,
    interleaved,
    looped,
    loops,
    one_f_one_b,
    placement,
    zb_v,
)
from pfeife.sched.families.orders import unit_times

TRAINING = {"gpipe": gpipe, "1f1b": one_f_one_b}
schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
SECONDS = {Do.FORWARD: 1, Do.BACKWARD: 2, Do.INPUT_BACKWARD: 1, Do.WEIGHT_BACKWARD: 1}


@attrs.frozen
class Figures:
    """`makespan`: from the first action of any rank to the last of any, in seconds. `span`: the
    longest time from one rank's first action to its own last one, which is what a step costs
    where it may overlap with the next (the zero-bubble papers' objective). `peak`: the most
    (stage, microbatch) pairs of one rank between forward and the end of the (weight-)backward."""

    makespan: int
    span: int
    peak: int


def figures(order: Schedule) -> Figures:
    """By the longest path through the graph of dependencies: nothing shared with the simulator."""
    graph, start = nx.DiGraph(), {}
    for rank in order.ranks:
        graph.add_nodes_from(rank)
        graph.add_edges_from(pairwise(rank))
    for action in list(graph):
        stage, k = action.stage, action.microbatch
        if action.do == Do.FORWARD and stage:
            graph.add_edge(Action(stage - 1, Do.FORWARD, k), action)
        elif action.do in (Do.BACKWARD, Do.INPUT_BACKWARD):
            deeper = [Action(stage + 1, do, k) for do in (Do.BACKWARD, Do.INPUT_BACKWARD)]
            graph.add_edges_from((one, action) for one in deeper if one in graph)
    for action in nx.topological_sort(graph):
        reads = graph.predecessors(action)
        start[action] = max((start[one] + SECONDS[one.do] for one in reads), default=0)
    ends = [start[rank[-1]] + SECONDS[rank[-1].do] for rank in order.ranks if rank]
    starts = [start[rank[0]] for rank in order.ranks if rank]
    spans = [end - start for start, end in zip(starts, ends, strict=True)]
    return Figures(max(ends), max(spans), max(map(peak, order.ranks)))


def peak(actions: Iterable[Action]) -> int:
    held = most = 0
    for action in actions:
        held += action.do == Do.FORWARD
        most = max(most, held)
        held -= action.do in (Do.BACKWARD, Do.WEIGHT_BACKWARD)
    return most


def natural(name: str, ranks: int, loops: int = 2) -> tuple[int, ...]:
    """As many stages a rank as the family is made for."""
    several = name in ("interleaved", "breadth-first", "zb-v", "v-half", "v-min", "dualpipe-v")
    return placement(name, ranks * (loops if several else 1), ranks)


# Unit costs: F = I = W = 1 second, B = 2, transfers 0, of one *stage*; p ranks, m microbatches.
# Makespan, span and peak in seconds and (stage, microbatch) pairs. With v stages on a rank a pair
# is 1/v of what a rank holds for one microbatch, and the rank's work on one takes 3v seconds; the
# papers' bubbles and activations are converted accordingly, for m >= p. Memory is freed at the
# end of the backward, with a split one at the end of W (ZB's M_W = M_B, its upper bound; CM too).
#
# naive: one microbatch at a time, m times its 3p seconds.
# gpipe: bubble (p - 1)(F + B), m microbatches held (GPipe, section 2.3; Narayanan et al.,
#   Megatron-LM, SC 2021, section 2.2.1). Rank 0 has the first and the last action, so that span
#   and makespan are one; the same for all families without another figure here.
# 1f1b: the same bubble, p held (Megatron-LM, section 2.2.1).
# eager-1f1b: the same bubble where transfers take no time, 2p - 1 held (Zhuang et al., On
#   Optimizing the Communication of Model Parallelism, MLSys 2023, section 4).
# interleaved: bubble (p - 1)(F + B) / v (Megatron-LM, section 2.2.2), which is 3 (p - 1) of our
#   seconds, as a stage is 1/v. Rank 0 holds its warm-up of (v - 1) p + 2 (p - 1) and one more:
#   p (1 + (p - 1)/(p v)) microbatches (Korthikanti et al., MLSys 2023, section 4.2.3). For m = p
#   that is more than there are, so it holds all.
# breadth-first: the same bubble, all held (Lamy-Poirier, MLSys 2023, section 4).
# zb-h1: bubble (p - 1)(F + B - W) = p - 1 in ZB's letters, whose B is our I; p held (Qi et al.,
#   Zero Bubble, ICLR 2024, section 2.3).
# zb-h2: bubble (p - 1)(F + B - 2W) = 0 of *span*, 2p - 1 held (same place). The makespan has
#   p - 1 nevertheless: the last rank cannot start before p - 1 and has 3m seconds of work. The
#   paper has m >= 2p - 1. With fewer, rank 0 has run all its m forwards and nothing is left to do
#   until the first gradient comes back at 2p - 1; no schedule avoids that wait of 2p - 1 - m.
# zb-v: bubble 0 of span, p held (Zero Bubble's first version, arXiv 2401.10241v1, section 6; Qi
#   et al., Controllable Memory, NeurIPS 2024, has the same of "V-ZB"). Makespan as above. For
#   m = p rank 0 waits 2p - 1 - m until the first forward is back, which no schedule avoids.
# v-half: about half of 1F1B's bubble, (p + 2) // 2 held (Controllable Memory, section 3, and the
#   table of the authors' demo: "~ p/2m" of the work). 1F1B's 3 (p - 1) is 6 (p - 1) of our
#   half-size seconds, and half of that is exactly what ours takes for even p.
# v-min: about two thirds of 1F1B's bubble, (p + 4) // 3 held (same place: "~ 2p/3m"). Two thirds
#   are 4 (p - 1) of our seconds. Ours takes one less: microbatches follow each other every 6
#   seconds without a wait, each goes down and up the V twice in 4p seconds, and the last weight-
#   backward adds one: 6 (m - 1) + 4p + 1.
#
# dualpipe-v (below): p + 1/2 held, 2p + 1 pairs (DeepSeek's table: PP + 1 for PP = 2p stages), for
#   m >= 2p. The bubble of that table, (p - 1)(F&B + B - 3W), is 2 (p - 1) where nothing runs side
#   by side (F&B = F + B = 3). The actions in their order take half of that, and so do torch's.
FORMULAS: dict[str, Callable[[int, int], Figures]] = {
    "naive": lambda p, m: Figures(3 * p * m, 3 * p * m, 1),
    "gpipe": lambda p, m: Figures(3 * (m + p - 1), 3 * (m + p - 1), m),
    "1f1b": lambda p, m: Figures(3 * (m + p - 1), 3 * (m + p - 1), p),
    "eager-1f1b": lambda p, m: Figures(3 * (m + p - 1), 3 * (m + p - 1), min(m, 2 * p - 1)),
    "interleaved": lambda p, m: _looped(p, m, 2, min(2 * m, 3 * p - 1)),
    "breadth-first": lambda p, m: _looped(p, m, 2, 2 * m),
    "loops": lambda p, m: FORMULAS["1f1b"](p, m),
    "zb-h1": lambda p, m: Figures(3 * m + p - 1, 3 * m + p - 1, p),
    "zb-h2": lambda p, m: Figures(3 * m + p - 1, 3 * m + max(0, 2 * p - 1 - m), min(m, 2 * p - 1)),
    "zb-v": lambda p, m: Figures(6 * m + p - 1, 6 * m + max(0, 2 * p - 1 - m), 2 * p),
    "v-half": lambda p, m: Figures(6 * m + 3 * (p - 1), 6 * m + 3 * (p - 1), 2 * ((p + 2) // 2)),
    "v-min": lambda p, m: Figures(
        6 * m + 4 * (p - 1) - 1, 6 * m + 4 * (p - 1) - 1, 2 * ((p + 4) // 3)
    ),
}


def _looped(p: int, m: int, v: int, held: int) -> Figures:
    return Figures(3 * (v * m + p - 1), 3 * (v * m + p - 1), held)


@pytest.mark.parametrize("p", (2, 4, 8, 16))
@pytest.mark.parametrize("name", FORMULAS)
def test_figures_of_the_papers(name, p):
    for m in (p, 2 * p, 4 * p):
        stage_ranks = natural(name, p)
        order = policy(name)(len(stage_ranks), m, stage_ranks)
        assert figures(order) == FORMULAS[name](p, m), m


@pytest.mark.parametrize("p", (2, 4, 8, 16))
def test_dual_pipe_v(p):
    for m in (2 * p, 2 * p + 1, 4 * p):
        order = policy("dualpipe-v")(2 * p, m)
        assert figures(order) == Figures(6 * m + p - 1, 6 * m + p - 1, 2 * p + 1), m


@pytest.mark.parametrize("v", (1, 3, 4))
@pytest.mark.parametrize("p", (2, 4, 8))
def test_interleaved_over_any_number_of_loops(p, v):
    for m in (p, 2 * p, 4 * p):
        order = interleaved(p * v, m, looped(p * v, p))
        assert figures(order) == _looped(p, m, v, min(v * m, (v + 1) * p - 1))


@pytest.mark.parametrize("name", ("interleaved", "breadth-first"))
@pytest.mark.parametrize("p", range(2, 7))
def test_rounds_that_do_not_divide_cost_no_bubble(name, p):
    for m in range(p, 4 * p):
        order = policy(name)(2 * p, m, looped(2 * p, p))
        assert figures(order).makespan == 3 * (2 * m + p - 1), m


@pytest.mark.parametrize("p", some(range(2, 14)))
def test_splitting_families_of_any_size(p):
    """For other p and m too. On an odd number of ranks V-Half takes a second less than half of
    1F1B's bubble; ZB-V, with a few more microbatches than ranks, takes up to p - 2 more than its
    formula: too many to hold them all at once, too few for a steady state."""
    for m in {p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1}:
        for name in ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min"):
            stage_ranks = natural(name, p)
            found, expected = (
                figures(policy(name)(len(stage_ranks), m, stage_ranks)),
                FORMULAS[name](p, m),
            )
            odd = p % 2 if name == "v-half" else 0
            few = p - 2 if name == "zb-v" and p < m < 2 * p - 1 else 0
            assert 0 <= found.makespan - expected.makespan + odd <= few, (name, m)
            assert found.peak == expected.peak, (name, m)
            if name != "zb-v" or m >= 2 * p - 1:
                assert found.span == expected.span - odd, (name, m)


@pytest.mark.parametrize(("p", "pairs"), [(2, [3, 4]), (3, [4, 4, 4]), (5, [5, 6, 6, 4, 6])])
def test_what_every_rank_holds_in_v_min(p, pairs):
    """In the paper's block a gradient goes up the V as fast as a forward goes down; where it goes
    slower, the first rank holds more."""
    assert list(map(peak, policy("v-min")(2 * p, 3 * p).ranks)) == pairs


def test_warm_ups_that_are_off_by_one_are_noticed():
    """The formulas tell 1F1B from its neighbours."""
    p, m = 4, 8
    assert figures(loops(p, m)) == FORMULAS["1f1b"](p, m)
    longer = figures(loops(p, m, prefetch=[1] * p))
    assert longer.peak == p + 1 and longer.makespan == FORMULAS["1f1b"](p, m).makespan
    shorter = figures(loops(p, m, prefetch=[-1, 0, 0, 0]))
    assert shorter.peak == p - 1 and shorter.makespan > FORMULAS["1f1b"](p, m).makespan
    with pytest.raises(ValueError, match="deadlocks"):
        loops(p, m, prefetch=[-2, 0, 0, 0])


def cost(action: Action) -> float:
    return float(SECONDS.get(action.do, 0))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_simulator_agrees(data):
    """The figures here are those of `simulate`, and of the times that `assign` goes by."""
    order = data.draw(placed_schedules())
    timeline = simulate(lowered(order), cost)
    assert timeline.seconds == figures(order).makespan
    times = dict((action, start) for start, action in unit_times(order.ranks, order.stages))
    computing = [event for event in timeline.events if event.action.do.kind]
    assert times == {event.action: event.start for event in computing}


@st.composite
def placed_schedules(draw: st.DrawFn) -> Schedule:
    """Any family, on its own placement or any other, with ranks that have no stage."""
    name = draw(st.sampled_from(sorted(POLICIES)))
    stages, microbatches = draw(st.integers(1, 10)), draw(st.integers(1, 12))
    count = draw(st.integers(1, 5))
    placements = st.sampled_from([None, looped(stages, count), folded(stages, count)])
    anywhere = st.lists(st.integers(0, 4), min_size=stages, max_size=stages)
    stage_ranks = draw(placements if name == "loops" else placements | anywhere)
    if name != "loops":
        return policy(name)(stages, microbatches, stage_ranks)
    return loops(stages, microbatches, None, prefetch=draw(st.integers(0, 3)))


@settings(max_examples=300, deadline=None)
@given(placed_schedules())
def test_every_family_runs(order):
    """Verified as a chain and with all its transfers; W after I, everything once."""
    assert verify_schedule(order) is order
    assert verify_schedule(lowered(order)).computing() == order


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 14), st.data())
def test_loops(p, v, m, data):
    """Every member of the family runs, or is refused with what would have happened."""
    batch = data.draw(st.integers(1, m))
    prefetch = data.draw(st.integers(0, 5) | st.lists(st.integers(0, 5), min_size=p, max_size=p))
    stage_ranks = data.draw(st.sampled_from([looped, folded]))(p * v, p)
    try:
        order = loops(p * v, m, stage_ranks, loop_batch=batch, prefetch=prefetch)
    except ValueError as error:
        assert "deadlocks: rank" in str(error) or "of the same rank comes before" in str(error)
        assert f"loop_batch={batch}, prefetch={prefetch}" in str(error)
        assert v > 1 or isinstance(prefetch, list)
    else:
        assert verify_schedule(order).stage_ranks == stage_ranks


def test_loops_has_the_others():
    for p, m in ((1, 3), (2, 2), (3, 7), (4, 4), (4, 9)):
        assert loops(p, m) == one_f_one_b(p, m)
        assert loops(p, m, prefetch=p - 1) == eager_one_f_one_b(p, m)
        assert loops(p, m, prefetch=[m] * p) == gpipe(p, m)
        stage_ranks = looped(3 * p, p)
        batches = loops(3 * p, 2 * p, stage_ranks, loop_batch=p, prefetch=p - 1)
        assert batches == interleaved(3 * p, 2 * p, stage_ranks)
        assert loops(3 * p, m, stage_ranks, prefetch=[3 * m] * p) == gpipe(3 * p, m, stage_ranks)


def test_loops_that_wait_for_one_another():
    with pytest.raises(ValueError, match=r"prefetch=\[0, 2, 0\]: 3 stages on ranks \[0, 1, 2\] ca"):
        loops(3, 4, prefetch=[0, 2, 0])
    with pytest.raises(ValueError, match=r"loop_batch=1, prefetch=2: .* deadlocks: rank 0 waits"):
        loops(6, 3, looped(6, 3), loop_batch=1, prefetch=2)
    with pytest.raises(ValueError, match=r"prefetch=\[1\] for 3 ranks"):
        loops(3, 4, prefetch=[1])
    with pytest.raises(ValueError, match="loop_batch=0: a loop has at least one"):
        loops(3, 4, loop_batch=0)


def test_a_rank_may_prefetch_more_than_the_next():
    order = loops(4, 6, prefetch=[3, 1, 1, 0])
    assert [peak(rank) for rank in order.ranks] == [6, 4, 3, 1]


@pytest.mark.parametrize(
    "make",
    [*map(policy, sorted(POLICIES)), *TRAINING.values(), forward_only],
    ids=lambda make: getattr(make, "name", None) or make.__name__,
)
def test_bad_placements_are_refused(make):
    with pytest.raises(ValueError, match="3 placements for 2 stages"):
        make(2, 1, (0, 1, 2))
    with pytest.raises(ValueError, match="ranks start at 0"):
        make(2, 1, (0, -1))
    with pytest.raises(ValueError, match="there is a stage"):
        make(0, 1)
    with pytest.raises(ValueError, match="microbatches=0: a step has at least one"):
        make(2, 0)


def test_placements():
    assert looped(5, 2) == (0, 1, 0, 1, 0)
    assert folded(8, 2) == (0, 1, 1, 0, 0, 1, 1, 0) and folded(5, 3) == (0, 1, 2, 2, 1)
    assert placement("zb-v", 4, 2) == (0, 1, 1, 0) and placement("1f1b", 4, 2) == (0, 1, 0, 1)
    assert zb_v(6, 5) == zb_v(6, 5, (0, 1, 2, 2, 1, 0))
    with pytest.raises(ValueError, match="'2f2b' is not known"):
        placement("2f2b", 4, 2)


def test_one_f_one_b_takes_turns_on_a_rank():
    """Two stages a rank in the order of their unit times, the deeper one first."""
    assert one_f_one_b(4, 3, (0, 1, 0, 1)).to_csv() == (
        "0F0,0F1,2F0,0F2,2F1,2B0,2F2,2B1,0B0,2B2,0B1,0B2\n"
        "1F0,1F1,3F0,3B0,3F1,1F2,3B1,1B0,3F2,3B2,1B1,1B2\n"
    )
    assert eager_one_f_one_b(3, 3, (0, 1, 0)).to_csv() == (
        "0F0,0F1,2F0,0F2,2B0,2F1,2B1,2F2,2B2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n"
    )


def test_forward_only_has_every_forward():
    order = verify_schedule(forward_only(3, 2, (0, 1, 0)))
    assert order.to_csv() == "0F0,2F0,0F1,2F1\n1F0,1F1\n"


def test_eager_warm_up_hides_transfers():
    """Transfers as long as a forward: 1F1B waits for them every time, eager 1F1B only once."""
    p, m = 4, 16

    def slow(action: Action) -> float:
        return 1.0 if action.do in SENDS else cost(action)

    plain, eager = (simulate(lowered(f(p, m)), slow) for f in (one_f_one_b, eager_one_f_one_b))
    ramp = (p - 1) * (1 + 1 + 2 + 1)  # down and up the pipeline with a transfer each
    assert eager.seconds == 3 * m + ramp
    assert plain.seconds > eager.seconds + m / 2


def torchs(kind: str, p: int, m: int, v: int = 1) -> Schedule:
    """The order of one of torch's schedules, without its stages and process group."""
    if not hasattr(schedules, kind):
        pytest.skip(f"this torch has no {kind}")
    made = object.__new__(getattr(schedules, kind))
    rounds = max(1, m // p)
    values = {"_n_microbatches": m, "_num_stages": p * v, "num_stages": p * v}
    values |= {"pp_group_size": p, "n_local_stages": v, "_stages": [None] * v}
    values |= {"number_of_rounds": rounds, "microbatches_per_round": m // rounds}
    try:
        for name, value in values.items():
            setattr(made, name, value)
        if v == 1:
            rows = list(made._get_pipeline_order().values())
        else:
            rows = [made._calculate_single_rank_operations(rank) for rank in range(p)]
    except AttributeError as error:
        pytest.skip(f"this torch makes {kind} in another way: {error}")
    parts = [[part for one in row if one for part in one.sub_actions or [one]] for row in rows]
    read = [[parse_action(str(part)) for part in row] for row in parts]
    return Schedule(tuple(tuple(a for a in row if a.do.kind) for row in read))


SAME = {
    "ScheduleGPipe": ("gpipe", 1, lambda p: (1, 2, p, 3 * p + 1)),
    "ScheduleInterleaved1F1B": ("interleaved", 2, lambda p: (p - 1, p, p + 1, 2 * p, 4 * p)),
    "ScheduleDualPipeV": ("dualpipe-v", 2, lambda p: (2 * p, 2 * p + 1, 4 * p)),
}


@pytest.mark.parametrize("p", (2, 3, 4, 8))
@pytest.mark.parametrize("kind", SAME)
def test_the_same_as_torch(kind, p):
    name, v, counts = SAME[kind]
    for m in counts(p):
        ours = policy(name)(p * v, m, natural(name, p, v))
        assert ours.to_csv() == torchs(kind, p, m, v).to_csv(), m


@pytest.mark.parametrize("p", (1, 2, 3, 4, 8))
def test_the_same_1f1b_as_torch(p):
    """Torch 2.13 writes the last rank's forwards down as 1, 2, ... instead of 0, 1, ..."""
    for m in (p, p + 1, 4 * p):
        *ours, last = one_f_one_b(p, m).ranks
        *other, others_last = torchs("Schedule1F1B", p, m).ranks
        assert ours == other
        off = others_last[0].microbatch or 0
        forwards = [attrs.evolve(a, microbatch=a.microbatch - off) for a in others_last[::2]]
        assert list(last) == [
            a for pair in zip(forwards, others_last[1::2], strict=True) for a in pair
        ]


def multiset(order: Schedule) -> list[Counter[Action]]:
    return [Counter(rank) for rank in order.ranks]


@pytest.mark.parametrize("v", (2, 3))
@pytest.mark.parametrize("p", (2, 3, 4, 8))
def test_breadth_first_takes_as_long_as_torchs(p, v):
    """Torch runs a stage's backwards from the last microbatch to the first; ours ascend."""
    for m in (p, p + 1, 2 * p):
        ours, other = gpipe(p * v, m, looped(p * v, p)), torchs("ScheduleLoopedBFS", p, m, v)
        assert multiset(ours) == multiset(other)
        assert figures(ours).peak == figures(other).peak
        assert figures(ours).makespan <= figures(other).makespan
        assert m > p or figures(ours).makespan == figures(other).makespan


@pytest.mark.parametrize("p", (2, 3, 4, 8))
def test_zb_v_takes_as_long_as_torchs(p):
    """With the same actions; where microbatches do not fill the V it takes no more."""
    for m in (1, p, 2 * p - 2, 2 * p - 1, 2 * p, 4 * p + 1):
        ours, other = zb_v(2 * p, m), torchs("ScheduleZBVZeroBubble", p, m, 2)
        assert multiset(ours) == multiset(other)
        if m < 2 * p - 1:
            assert figures(ours).makespan <= figures(other).makespan
        else:
            assert figures(ours) == figures(other)


def in_order(actions: Sequence[Action], do: Do) -> list[tuple[int, int | None]]:
    return [(a.stage, a.microbatch) for a in actions if a.do == do]


@pytest.mark.parametrize("p", (2, 4))
def test_zb_v_runs_in_torchs_order(p):
    """Forwards and input-backwards in the very same order; weights as old ones first."""
    for m in (2 * p - 1, 3 * p):
        ours, other = zb_v(2 * p, m), torchs("ScheduleZBVZeroBubble", p, m, 2)
        for mine, theirs in zip(ours.ranks, other.ranks, strict=True):
            for do in (Do.FORWARD, Do.INPUT_BACKWARD):
                assert in_order(mine, do) == in_order(theirs, do)


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("name", TRAINING)
def test_makespan_and_memory_at_unit_cost(name, stages):
    """The textbook's numbers: both take (m + p - 1) * 2, and 1F1B keeps p - s microbatches."""
    for m in range(1, 13):
        order = verify_schedule(TRAINING[name](stages, m))
        timeline = simulate(lowered(order), unit)
        assert timeline.seconds == (m + stages - 1) * 2
        assert timeline.bubble == pytest.approx((stages - 1) / (m + stages - 1))
        expected = [m if name == "gpipe" else min(m, stages - s) for s in range(stages)]
        assert in_flight(order) == tuple(expected)
        verify_schedule(order, in_flight=expected[0])


def test_in_flight_ends_with_the_weights():
    """A split backward holds its microbatch until the weight-backward."""
    assert in_flight(Schedule.from_csv("0F0,0I0,0F1,0I1,0W0,0W1\n")) == (2,)
    assert in_flight(Schedule.from_csv("0F0,0I0,0W0,0F1,0I1,0W1\n")) == (1,)


def test_policies_by_name():
    assert policy("gpipe").make is gpipe and policy("1f1b").make is one_f_one_b
    with pytest.raises(ValueError, match=r"'2f2b' is not known; there are \['1f1b', 'br"):
        policy("2f2b")
