"""Schedules that cannot run, or do not compute what they must, are refused; no others are."""

from collections.abc import Sequence

import attrs
import networkx as nx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from orders import CHAIN, flow, lowered, placed, shuffled, unit

from pfeife.data.schedule import RECEIVES, SENDS, Action, Schedule
from pfeife.data.timeline import Timeline
from pfeife.lowering.problem import Problem, StageCosts, chain_edges
from pfeife.lowering.simulate import simulate
from pfeife.lowering.verify import verify_schedule
from pfeife.sched.families import gpipe, one_f_one_b


def edited(schedule: Schedule, rank: int, actions: Sequence[Action]) -> Schedule:
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(actions)
    return Schedule(tuple(ranks))


def ascending(order: Schedule) -> bool:
    for rank in order.ranks:
        for stage, kinds in {(a.stage, kinds) for a in rank for kinds in ("F", "BI", "BW")}:
            found = [a.microbatch for a in rank if a.stage == stage and a.do in tuple(kinds)]
            if found != sorted(found):
                return False
    return True


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
        ("0F0,0F1,0I0,0B1,0W0\n", r"rank 0: 0I0 0B1 \[0W0\]: microbatches of a stage .* ascending"),
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
        ("0F0,0B0,0REDUCE_GRAD0\n", r"\[0REDUCE_GRAD0\]: the reduction of gradients is of all"),
        ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD\n", r"REDUCE_GRAD \[0REDUCE_GRAD\]: scheduled more"),
        (
            "0F0,0B0,0REDUCE_GRAD,1REDUCE_GRAD\n1F0,1B0,1REDUCE_GRAD,0REDUCE_GRAD\n",
            r"deadlocks: rank 0 waits at \[0REDUCE.*; rank 1 waits at \[1REDUCE_GRAD\] 0REDUCE",
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
