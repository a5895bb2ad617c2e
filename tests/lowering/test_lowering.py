"""Schedules and cuts on bare numbers: what the policies promise, and that proofs are proofs."""

import functools
from collections.abc import Sequence
from itertools import combinations, pairwise

import attrs
import networkx as nx
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from models import case
from orders import CHAIN, lowered, placed, reductions, shuffled
from torch import nn

import pfeife
from pfeife.cost import estimate, machine
from pfeife.data.machine import Machine
from pfeife.data.plain import from_json, to_json
from pfeife.data.plan import Plan
from pfeife.data.schedule import RECEIVES, SENDS, Action, Do, Schedule, parse_action, received_as
from pfeife.data.timeline import Timeline
from pfeife.ir.program import Kind, Reduction
from pfeife.lowering.lower import Transfer, chain, insert_actions
from pfeife.lowering.problem import Problem, StageCosts, chain_edges
from pfeife.lowering.replay import replay
from pfeife.lowering.simulate import simulate
from pfeife.lowering.verify import verify_schedule
from pfeife.sched import (
    balanced,
    forward_only,
    gpipe,
    in_flight,
    naive,
    one_f_one_b,
    plan,
    policy,
    split_at,
)
from pfeife.sched.cutting.cuts import Clusters, borders

CPU_CORE = machine("cpu-core")
TRAINING = {"gpipe": gpipe, "1f1b": one_f_one_b}


def edited(schedule: Schedule, rank: int, actions: Sequence[Action]) -> Schedule:
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(actions)
    return Schedule(tuple(ranks))


def unit(action: Action) -> float:
    return 1.0 if action.do.kind else 0.0


def flow(order: Schedule) -> nx.DiGraph:
    """What must come before what, written down a second time: an independent oracle."""
    graph = nx.DiGraph()
    for rank in order.ranks:
        graph.add_nodes_from(rank)
        graph.add_edges_from(pairwise(rank))
    for action in list(graph):
        stage, k = action.stage, action.microbatch
        if action.do == Do.FORWARD:
            graph.add_edges_from([(Action(stage - 1, Do.FORWARD, k), action)] if stage else [])
        elif action.do == Do.WEIGHT_BACKWARD:
            graph.add_edge(Action(stage, Do.INPUT_BACKWARD, k), action)
        else:
            graph.add_edge(Action(stage, Do.FORWARD, k), action)
            for do in (Do.BACKWARD, Do.INPUT_BACKWARD):
                if (later := Action(stage + 1, do, k)) in graph:
                    graph.add_edge(later, action)
    return graph


def ascending(order: Schedule) -> bool:
    for rank in order.ranks:
        for key in {(a.stage, a.do) for a in rank}:
            found = [a.microbatch for a in rank if (a.stage, a.do) == key]
            if found != sorted(found):
                return False
    return True


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


@settings(max_examples=100)
@given(placed())
def test_every_placement_runs(order):
    """No policy deadlocks, however its stages are placed."""
    assert verify_schedule(order) is order
    full = verify_schedule(lowered(order))
    assert full.computing() == order
    timeline = simulate(full, unit)
    assert len(timeline.events) == sum(map(len, full.ranks))
    for rank, actions in enumerate(full.ranks):
        assert [e.action for e in timeline.events if e.rank == rank] == list(actions)


@settings(max_examples=100)
@given(placed(), st.data())
def test_simulated_times(order, data):
    """Nothing starts before what it reads is there, a rank does one thing at a time, a channel
    carries one transfer at a time, and nothing waits without a reason."""
    durations = data.draw(st.lists(st.integers(0, 4), min_size=3, max_size=3))

    def cost(action: Action) -> float:
        if action.do in RECEIVES:
            return 0.0
        return float(durations[("F", "B").index(action.do) if action.do.kind else 2])

    full = lowered(order)
    timeline = simulate(full, cost)
    start = {event.action: event.start for event in timeline.events}
    end = {event.action: event.end for event in timeline.events}
    free: dict[tuple[int, int], float] = {}
    arrival: dict[Action, float] = {}
    stage_ranks = full.stage_ranks
    for rank, actions in enumerate(full.ranks):
        for action in actions:
            if action.do in SENDS:
                channel = (rank, stage_ranks[action.peer])
                begin = max(start[action], free.get(channel, 0.0))
                free[channel] = arrival[action] = begin + cost(action)
    arrives = {(a.peer, a.stage, a.do, a.microbatch): t for a, t in arrival.items()}
    for rank in full.ranks:
        clock = 0.0
        for action in rank:
            assert start[action] == clock
            clock = end[action]
            if action.do in RECEIVES:
                sent = Do.SEND_F if action.do == Do.RECV_F else Do.SEND_B
                there = arrives[action.stage, action.peer, sent, action.microbatch]
                assert clock == max(start[action], there)
            else:
                assert clock - start[action] == (cost(action) if action.do.kind else 0.0)
    for before, after in flow(order).edges:
        assert end[before] <= start[after]


def test_transfers_take_their_turn():
    """By hand: two microbatches, a link three times slower than a computation."""
    timeline = simulate(lowered(gpipe(2, 2)), lambda a: 3.0 if a.do in SENDS else unit(a))
    starts = {str(e.action): (e.start, e.end) for e in timeline.events if e.action.do.kind}
    assert starts == {
        **{"0F0": (0, 1), "0F1": (1, 2), "1F0": (4, 5), "1F1": (7, 8)},
        **{"1B0": (8, 9), "1B1": (9, 10), "0B0": (12, 13), "0B1": (15, 16)},
    }


def test_policies_by_name():
    assert policy("gpipe").make is gpipe and policy("1f1b").make is one_f_one_b
    with pytest.raises(ValueError, match=r"'2f2b' is not known; there are \['1f1b', 'br"):
        policy("2f2b")
    for make in (*TRAINING.values(), forward_only):
        with pytest.raises(ValueError, match="3 placements for 2 stages"):
            make(2, 1, (0, 1, 2))
        with pytest.raises(ValueError, match="ranks start at 0"):
            make(2, 1, (0, -1))
        with pytest.raises(ValueError, match="there is a stage"):
            make(0, 1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0F0,0B0\n1F0\n", "rank 1, stage 1, microbatch 0: 1F0 is scheduled; expected F and B"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0\n", "rank 1, stage 1, microbatch 1: nothing is scheduled"),
        ("0F0,0I0\n", "rank 0, stage 0, microbatch 0: 0F0, 0I0 is scheduled"),
        ("0F0,0B0,0I0,0W0\n", "rank 0, stage 0, microbatch 0: 0B0, 0F0, 0I0, 0W0 is scheduled"),
        ("0F0,0B0,0F1,0W1\n", "rank 0, stage 0, microbatch 1: 0F1, 0W1 is scheduled"),
        ("0F0,0B0\n1F0\n2F0,2B0\n", "rank 1, stage 1, microbatch 0: 1F0 is scheduled"),
        ("0F0,0F0,0B0\n", r"rank 0: 0F0 \[0F0\] 0B0: scheduled more than once"),
        ("0F0,0B0,0F1,0B1,0B0\n", r"rank 0: 0F1 0B1 \[0B0\]: scheduled more than once"),
        ("0F0,0B0\n0F0,0B0\n", "stage 0 runs on ranks 0 and 1"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 runs on no rank"),
        ("0B0,0F0\n", r"rank 0: \[0B0\] 0F0: a backward comes after its forward"),
        ("0I0,0F0,0W0\n", r"rank 0: \[0I0\] 0F0 0W0: a backward comes after its forward"),
        ("0F0,0W0,0I0\n", r"rank 0: 0F0 \[0W0\] 0I0: a weight-backward comes after its input"),
        ("0F1,0F0,0B0,0B1\n", r"rank 0: 0F1 \[0F0\] 0B0 0B1: microbatches .* ascending"),
        ("0F0,0F1,0B1,0B0\n", r"rank 0: 0F1 0B1 \[0B0\]: microbatches of a stage .* ascending"),
        ("0F\n", r"rank 0: \[0F\]: microbatches of a stage run in ascending"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2B0,2F0,2F1,2B1\n", r"rank 2: \[2B0\] 2F0 2F1: a ba"),
        ("1F0,0F0,1B0,0B0\n", r"rank 0: \[1F0\] 0F0 1B0: stage 0 of the same rank comes before"),
        ("0F0,1F0,0B0,1B0\n", r"rank 0: 0F0 1F0 \[0B0\] 1B0: stage 1 of the same rank comes bef"),
        # Both ranks could run these alone, but not together.
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", r"deadlocks: rank 0 waits at .*\[0RECV_B0\]"),
        (
            CHAIN.replace("0SEND_F0,0RECV_B0,0B0", "0RECV_B0,0B0,0SEND_F0"),
            r"deadlocks: rank 0 waits at 0F0 \[0RECV_B0\] 0B0 0SEND_F0; rank 1 waits at \[1RECV",
        ),
        ("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1F1,1RECV_F0,1F0\n", "ascending|sends 1RECV_F0"),
        (
            "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1\n",
            r"rank 1 expects 1RECV_F1 from rank 0, which sends 1RECV_F0 first: \[1RECV_F1\] 1RE",
        ),
        (CHAIN.replace("1RECV_F0,", ""), "never received: rank 1 has no 1RECV_F0 for .* rank 0"),
        (CHAIN.replace("0SEND_F0,", ""), r"deadlocks: .*rank 1 waits at \[1RECV_F0\] 1F0 1B0"),
        ("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0\n", r"deadlocks: rank 0 .*\[0RECV_B0\] 0B0; rank 1"),
        (CHAIN.replace("0SEND_F0", "0SEND_F0,0SEND_F0"), r"rank 0: .*\[0SEND_F0\] .* than once"),
        (CHAIN.replace("0F0,0SEND_F0", "0SEND_F0,0F0"), r"rank 0: \[0SEND_F0\] 0F0 .* a send com"),
        (CHAIN.replace("1B0,1SEND_B0", "1SEND_B0,1B0"), r"rank 1: .*\[1SEND_B0\] 1B0: a send com"),
        (CHAIN.replace("1SEND_B0", "1SEND_B0@1"), r"\[1SEND_B0@1\]: stage 1 at the other end runs"),
        (CHAIN.replace("1SEND_B0", "1SEND_B0@7"), r"\[1SEND_B0@7\]: stage 7 at the other end runs"),
        (CHAIN.replace("1SEND_B0", "1SEND_B"), r"rank 1: .*\[1SEND_B\]: a .*of one microbatch|aft"),
        (CHAIN.replace("0RECV_B0", "1RECV_F0"), r"rank 0: .*\[1RECV_F0\] 0B0: stage 1 runs on ra"),
        ("0F0,0REDUCE_GRAD,0B0\n", r"rank 0: 0F0 0REDUCE_GRAD \[0B0\]: a gradient comes after its"),
        ("0F0,0I0,0REDUCE_GRAD,0W0\n", r"0I0 0REDUCE_GRAD \[0W0\]: a gradient comes after its"),
        ("0F0,0B0,0REDUCE_GRAD0\n", r"\[0REDUCE_GRAD0\]: a reduction is of all microbatches"),
        ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD\n", r"REDUCE_GRAD \[0REDUCE_GRAD\]: scheduled more"),
        # Rank 1 owes rank 0 a gradient, and rank 0 waits for it before it comes to reduce.
        (
            CHAIN.replace("0B0", "0B0,0REDUCE_GRAD").replace("1B0", "1B0,0REDUCE_GRAD"),
            r"rank 0 waits at .*\[0RECV_B0\].*; rank 1 waits at 1F0 1B0 \[0REDUCE_GRAD\] 1SEND_B0",
        ),
    ],
)
def test_refused_schedules(text, problem):
    with pytest.raises(ValueError, match=problem):
        verify_schedule(Schedule.from_csv(text))


def test_a_transfer_without_other_end_is_refused():
    """JSON can leave out what the text form fills in."""
    for action in Schedule.from_csv(CHAIN).ranks[0]:
        other = None if action.do in SENDS or action.do in RECEIVES else 1
        with pytest.raises(ValueError, match=rf"{action.stage}{action.do} with the peer {other}"):
            attrs.evolve(action, peer=other)


def test_in_flight_limit():
    order = gpipe(2, 3)
    verify_schedule(order, in_flight=3)
    with pytest.raises(ValueError, match=r"rank 0: 0F0 0F1 \[0F2\] 0B0 0B1: more than 2 microb"):
        verify_schedule(order, in_flight=2)
    split = Schedule.from_csv("0F0,0I0,0F1,0I1,0W0,0W1\n")
    with pytest.raises(ValueError, match=r"rank 0: 0F0 0I0 \[0F1\] 0I1 0W0: more than 1"):
        verify_schedule(split, in_flight=1)


def test_ranks_are_asked_again_only_when_something_has_come():
    """All ranks but one wait: to ask them all each time would take as many times as long."""
    full, arrived, asked = lowered(naive(16, 8)), set(), []

    def advance(rank: int, action: Action) -> int | None:
        asked.append(rank)
        if action.do in SENDS:
            arrived.add(received_as(action))
        return stage_ranks[action.peer] if action.do in RECEIVES and action not in arrived else None

    stage_ranks = full.stage_ranks
    replay(full.ranks, advance)
    actions = sum(map(len, full.ranks))
    assert actions < len(asked) < 2 * actions


def test_a_deadlock_names_its_circle():
    """Not the ranks that wait for one of it, and what has ended is said to have ended."""
    late = "0F0,0RECV_B0,0B0,0SEND_F0\n1RECV_F0,1F0,1SEND_F0,1B0,1SEND_B0\n2RECV_F0,2F0\n"
    with pytest.raises(ValueError) as circle:
        simulate(Schedule.from_csv(late), unit)
    assert str(circle.value) == (
        "the schedule deadlocks: rank 0 waits at 0F0 [0RECV_B0] 0B0 0SEND_F0; rank 1 waits at "
        "[1RECV_F0] 1F0 1SEND_F0; each for the next, in a circle"
    )
    with pytest.raises(ValueError, match=r"at \[1RECV_F0\] 1F0 for rank 0, which has ended$"):
        simulate(Schedule.from_csv("0F0\n1RECV_F0,1F0\n"), unit)


@settings(max_examples=150)
@given(shuffled())
def test_verify_accepts_exactly_what_can_run(order):
    """A cycle in an independently built graph of dependencies is what verify refuses."""
    runs = nx.is_directed_acyclic_graph(flow(order)) and ascending(order)
    try:
        verify_schedule(order)
    except ValueError as error:
        assert not runs, error
    else:
        assert runs
        assert isinstance(simulate(verify_schedule(lowered(order)), unit), Timeline)


@settings(max_examples=100)
@given(placed((gpipe, one_f_one_b)), st.data())
def test_every_missing_or_doubled_action_is_found(order, data):
    assume(order.stages * order.microbatches > 1)  # a forward alone is a schedule
    full = lowered(order)
    rank = data.draw(st.sampled_from([r for r, actions in enumerate(full.ranks) if actions]))
    actions = full.ranks[rank]
    at = data.draw(st.integers(0, len(actions) - 1))
    with pytest.raises(ValueError):
        verify_schedule(edited(full, rank, actions[:at] + actions[at + 1 :]))
    again = data.draw(st.integers(0, len(actions)))
    with pytest.raises(ValueError):
        verify_schedule(edited(full, rank, (*actions[:again], actions[at], *actions[again:])))


@settings(max_examples=100)
@given(placed((gpipe, one_f_one_b)), st.data())
def test_inserted_actions(order, data):
    """Sends follow at once what they send, receives come as late as the order of the channel
    lets them, and a reduction comes after the gradients, in one order on all ranks."""
    wanted = data.draw(reductions(order))
    full = verify_schedule(insert_actions(order, chain(order), wanted))
    stage_ranks = full.stage_ranks
    orders = []
    for rank, actions in enumerate(full.ranks):
        for before, action in pairwise(actions):
            if action.do in SENDS:
                maker = Do.FORWARD if action.do == Do.SEND_F else Do.BACKWARD
                assert before == Action(action.stage, maker, action.microbatch)
            if before.do in RECEIVES:
                assert action.do in RECEIVES or action.stage == before.stage
        reduced = [a.stage for a in actions if a.do == Do.REDUCE_GRAD]
        orders.append(reduced)
        assert sorted(set(reduced)) == sorted({r.stages[0] for r in wanted if rank in r.ranks})
        for reduction in wanted:
            for stage in reduction.stages:
                if rank in reduction.ranks and stage_ranks[stage] == rank:
                    at = actions.index(Action(reduction.stages[0], Do.REDUCE_GRAD))
                    last = Action(stage, Do.BACKWARD, full.microbatches - 1)
                    assert actions.index(last) < at
    graph = nx.DiGraph(edge for reduced in orders for edge in pairwise(reduced))
    assert nx.is_directed_acyclic_graph(graph), "ranks reduce in different orders"


def test_tied_weights_on_looped_stages_do_not_deadlock():
    """Once every rank waited in the reduction before it had sent its last gradients."""
    order = gpipe(4, 2, (0, 1, 0, 1))
    full = insert_actions(order, chain(order), [Reduction("embed", (0, 1), (0, 3))])
    assert [str(rank[-1]) for rank in full.ranks] == ["0REDUCE_GRAD"] * 2
    verify_schedule(full)


def test_reductions_of_one_rank_overlap():
    """The last stage of a rank reduces while the others still compute."""
    order = gpipe(4, 1, (0, 1, 0, 1))
    full = insert_actions(
        order, chain(order), [Reduction(str(s), (s % 2,), (s,)) for s in range(4)]
    )
    assert " ".join(map(str, full.ranks[1])).endswith(
        "3B0 3SEND_B0 3REDUCE_GRAD 1RECV_B0 1B0 1SEND_B0 1REDUCE_GRAD"
    )


def test_skip_connections_are_received_in_the_order_of_the_sends():
    """A message that is needed late but sent early is received early, or the channel blocks."""
    skip = Transfer(0, Kind.FORWARD, 2, ((2, Kind.FORWARD),))
    order = gpipe(3, 1, (0, 1, 1))
    near, back = chain(order)
    full = insert_actions(order, [skip, near, back])
    assert full.to_csv() == (
        "0F0,0SEND_F0@2,0SEND_F0,0RECV_B0,0B0\n2RECV_F0@0,1RECV_F0,1F0,2F0,2B0,1B0,1SEND_B0\n"
    )
    assert parse_action("2RECV_F0@0") in verify_schedule(full).ranks[1]


LINK = Machine("slow link", 1.0, 1.0, 10**9, link_bandwidth=2.0, link_latency=1.0)
small = st.integers(0, 6)


@st.composite
def clusters(draw: st.DrawFn) -> Clusters:
    """Up to 8 clusters of whole numbers, so that sums are exact in any order."""
    count = draw(st.integers(1, 8))
    column = st.lists(small, min_size=count, max_size=count).map(tuple)
    return Clusters(
        seconds=tuple(map(float, draw(column))),
        parameters=draw(column),
        saved=draw(column),
        crossing=(0, *draw(column)[1:]),
        blocked=frozenset(draw(st.sets(st.integers(1, count)))) - {count},
    )


def every_cut(
    given: Clusters, stages: int, flying: Sequence[int], limit: int, overlap: float
) -> dict[tuple[int, ...], list[float]]:
    """The stages' seconds of every allowed cut."""
    count, found = len(given.seconds), {}
    sent = [1.0 + size / 2.0 for size in given.crossing]
    for cuts in combinations(sorted(set(range(1, count)) - given.blocked), stages - 1):
        ends = list(pairwise((0, *cuts, count)))
        fits = all(
            2 * sum(given.parameters[a:b]) + flying[stage] * sum(given.saved[a:b]) <= limit
            for stage, (a, b) in enumerate(ends)
        )
        if fits:
            found[cuts] = []
            for a, b in ends:
                taken = sum((1 - overlap) * sent[at] for at in (a, b) if 0 < at < count)
                busy = sum(given.seconds[a:b]) + taken
                found[cuts].append(max(busy, sent[a] if a else 0.0))
    return found


@settings(max_examples=300)
@given(clusters(), st.data())
def test_balanced_equals_brute_force(given, data):
    count = len(given.seconds)
    stages = data.draw(st.integers(1, count))
    flying = data.draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    limit = data.draw(st.none() | st.integers(0, 60))
    link = attrs.evolve(LINK, overlap=data.draw(st.sampled_from((0.0, 0.5, 1.0))))
    cut = functools.partial(
        balanced, given, stages, machine=link, in_flight=flying, memory_limit=limit
    )
    found = every_cut(given, stages, flying, LINK.memory if limit is None else limit, link.overlap)
    if not found:
        with pytest.raises(ValueError, match=f"no cut into {stages} stages"):
            cut()
        return
    stage_of = cut()
    assert len(stage_of) == count and list(stage_of) == sorted(stage_of)
    assert sorted(set(stage_of)) == list(range(stages))
    assert borders(stage_of) in found, "this cut is blocked, or does not fit"
    slowest = min(map(max, found.values()))
    assert max(found[borders(stage_of)]) == slowest
    squares = [sum(s * s for s in each) for each in found.values() if max(each) == slowest]
    assert sum(s * s for s in found[borders(stage_of)]) == min(squares)


def test_too_many_stages():
    given = Clusters((1.0,) * 3, (5,) * 3, (1,) * 3, (0,) * 3)
    assert balanced(given, 3, machine=LINK, in_flight=(1, 1, 1)) == (0, 1, 2)
    with pytest.raises(ValueError, match="4 stages, but the program has only 3 clusters"):
        balanced(given, 4, machine=LINK, in_flight=(1,) * 4)
    with pytest.raises(ValueError, match=r"fits 10 bytes a rank \(the largest .* takes 11\)"):
        balanced(given, 3, machine=LINK, in_flight=(1,) * 3, memory_limit=10)
    tiny = attrs.evolve(LINK, memory=10)
    with pytest.raises(ValueError, match="fits 10 bytes"):
        balanced(given, 3, machine=tiny, in_flight=(1,) * 3)


@functools.cache
def program() -> pfeife.Program:
    one = case("DropoutNet")
    fused = pfeife.fuse()(pfeife.capture(one.step, *one.batch(2)))
    return pfeife.annotate(estimate(fused, CPU_CORE))(fused)


@pytest.mark.parametrize(
    ("width", "rows", "trained", "frozen"), [(1024, 64, 4, 0), (2048, 16, 2, 3)]
)
def test_the_default_cut_is_the_best_of_all(width, rows, trained, frozen):
    """By the planner's own judge: to add up gradients takes time, which transfers do not where
    other hardware moves the bytes."""
    h100 = machine("h100-sxm")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(trained + frozen)))
        model[trained:].requires_grad_(False)
        flat = pfeife.capture(lambda x: model(x).square().sum(), torch.randn(rows, width))
    fused = pfeife.fuse()(flat)
    fused = pfeife.annotate(estimate(fused, h100))(fused)
    for stages, microbatches in ((2, 4), (3, 8)):
        wanted = functools.partial(
            plan, fused, machine=h100, microbatches=microbatches, stages=stages
        )
        cuts = combinations(range(1, fused.units), stages - 1)
        stages_of = [[sum(c <= unit for c in cut) for unit in range(fused.units)] for cut in cuts]
        every = [wanted(cuts=stage_of).step_seconds for stage_of in stages_of]
        assert len(every) > 1 and wanted().step_seconds == pytest.approx(min(every))


def test_plans_deal_stages_to_ranks():
    made = plan(program(), machine=CPU_CORE, microbatches=3, stages=4, ranks=2)
    assert made.stage_ranks == (0, 1, 0, 1) and made.stages == 4
    assert from_json(Plan, to_json(made)) == made
    assert made.stage_seconds is not None and made.step_seconds is not None
    assert made.step_seconds >= 3 * (made.stage_seconds[1] + made.stage_seconds[3])
    with pytest.raises(ValueError, match="2 stages for 3 ranks: every rank needs a stage"):
        plan(program(), machine=CPU_CORE, microbatches=3, stages=2, ranks=3)
    with pytest.raises(ValueError, match="stages=3, but the cuts by hand make 1 stages"):
        cuts = split_at(program(), {"layers.0": "begin"})
        plan(program(), machine=CPU_CORE, microbatches=3, stages=3, cuts=cuts)


def test_plans_need_costs():
    bare = pfeife.fuse()(program())
    with pytest.raises(ValueError, match="have no costs; annotate the program first"):
        plan(bare, machine=CPU_CORE, microbatches=1)


def test_one_rank_has_no_bubble():
    """All stages on one rank: the step takes what its computations take."""
    made = plan(program(), machine=CPU_CORE, microbatches=3, stages=3, ranks=1)
    assert made.step_seconds == pytest.approx(3 * sum(made.stage_seconds))


def test_blocking_transfers_deadlock_where_both_ends_send():
    """1F1B's neighbours send to one another at once; fill and drain has one direction a time."""
    assert verify_schedule(gpipe(3, 4), blocking=True)
    assert verify_schedule(one_f_one_b(2, 4))
    with pytest.raises(ValueError, match="the schedule deadlocks: rank 0 waits at"):
        verify_schedule(one_f_one_b(2, 4), blocking=True)


def test_memory_is_checked_at_every_moment():
    """A limit of two microbatches stops GPipe's third forward; I frees what W does not keep."""
    costs = StageCosts(1.0, 1.0, 1.0, saved=10.0, kept=4.0)
    tight = Problem((costs, costs), (0, 1), 3, chain_edges(2), memory=(20.0, 20.0))
    assert verify_schedule(one_f_one_b(2, 3), problem=tight)
    with pytest.raises(ValueError, match=r"rank 0: 0F0 0F1 \[0F2\] .*30 bytes .* limit is 20"):
        verify_schedule(gpipe(2, 3), problem=tight)
    split = Schedule.from_csv("0F0,0F1,0I0,0F2,0W0,0I1,0W1,0I2,0W2\n")
    with pytest.raises(ValueError, match="24 bytes"):
        verify_schedule(split, problem=Problem((costs,), (0,), 3, (), memory=(20.0,)))
    assert verify_schedule(split, problem=Problem((costs,), (0,), 3, (), memory=(24.0,)))
