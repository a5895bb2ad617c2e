"""When a rank knows that what it sent has arrived: by hand, exactly, and in every simulated run."""

import random
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import CHAIN, lowered, schedules

from pfeife.data.schedule import RECEIVES, SENDS, Action, Schedule, received_as
from pfeife.lowering.clocks import acknowledged
from pfeife.lowering.simulate import simulate
from pfeife.sched.families import gpipe, one_f_one_b


def by_action(schedule: Schedule) -> list[dict[str, dict[int, int]]]:
    return [
        {str(actions[index]): counts for index, counts in found.items()}
        for actions, found in zip(schedule.ranks, acknowledged(schedule), strict=True)
    ]


def test_gpipe_by_hand():
    """The first gradient says that all activations are there; nothing tells of gradients."""
    for m in range(1, 5):
        assert by_action(lowered(gpipe(2, m))) == [{"0RECV_B0": {1: m}}, {}]


def test_1f1b_by_hand():
    """A gradient tells of its own activations, activations of a gradient two microbatches ago."""
    assert by_action(lowered(one_f_one_b(2, 4))) == [
        {"0RECV_B0": {1: 1}, "0RECV_B1": {1: 1}, "0RECV_B2": {1: 1}, "0RECV_B3": {1: 1}},
        {"1RECV_F2": {0: 1}, "1RECV_F3": {0: 1}},
    ]


def test_a_reduction_tells_nothing():
    """Nobody waits for it before the end."""
    text = "0F0,0SEND_F0,0REDUCE_GRAD\n1RECV_F0,1F0,0REDUCE_GRAD\n"
    assert by_action(Schedule.from_csv(text)) == [{}, {}]


def test_news_of_a_third_rank():
    """Rank 0 hears through rank 2 that rank 1 has received."""
    text = "0F0,0SEND_F0@1,0RECV_B0@2,0B0\n1RECV_F0,1F0,1SEND_F0\n2RECV_F0,2F0,2B0,2SEND_B0@0\n"
    assert by_action(Schedule.from_csv(text)) == [{"0RECV_B0@2": {1: 1}}, {}, {}]


def order(schedule: Schedule) -> nx.DiGraph:
    """What happens before what, written down a second time; nodes are ranks with actions."""
    graph = nx.DiGraph()
    stage_ranks = schedule.stage_ranks
    for rank, actions in enumerate(schedule.ranks):
        graph.add_nodes_from((rank, action) for action in actions)
        graph.add_edges_from(pairwise((rank, action) for action in actions))
    for rank, action in list(graph):
        if action.do in SENDS:
            graph.add_edge((rank, action), (stage_ranks[action.peer], received_as(action)))
    return graph


@settings(max_examples=60)
@given(schedules())
def test_exactly_what_can_be_known(schedule):
    """A message is acknowledged at the first receive that its own receive comes before."""
    graph, stage_ranks, found = order(schedule), schedule.stage_ranks, acknowledged(schedule)
    for rank, actions in enumerate(schedule.ranks):
        expected: dict[int, dict[int, int]] = {}
        waiting: list[tuple[int, Action]] = []
        for index, action in enumerate(actions):
            if action.do in SENDS:
                waiting.append((stage_ranks[action.peer], received_as(action)))
            elif action.do in RECEIVES:
                past = nx.ancestors(graph, (rank, action))
                for message in [m for m in waiting if m in past]:
                    waiting.remove(message)
                    counts = expected.setdefault(index, {})
                    counts[message[0]] = counts.get(message[0], 0) + 1
        assert found[rank] == expected


@settings(max_examples=60)
@given(schedules(), st.integers(0, 1000))
def test_acknowledged_after_it_was_received(schedule, seed):
    """However long everything takes; and no more than was sent, in the order of the channel."""
    drawn = random.Random(seed)
    times = {a: drawn.choice((0.0, 1.0, 10.0)) for rank in schedule.ranks for a in rank}
    busy = {a: drawn.choice((0.0, 1.0)) for rank in schedule.ranks for a in rank}
    timeline = simulate(schedule, times.__getitem__, occupied=busy.__getitem__)
    end = {(event.rank, event.action): event.end for event in timeline.events}
    stage_ranks = schedule.stage_ranks
    for rank, (actions, found) in enumerate(
        zip(schedule.ranks, acknowledged(schedule), strict=True)
    ):
        leaving: dict[int, list[Action]] = {}
        for index, action in enumerate(actions):
            if action.do in SENDS:
                leaving.setdefault(stage_ranks[action.peer], []).append(received_as(action))
            for destination, count in found.get(index, {}).items():
                gone = leaving[destination]
                assert 0 < count <= len(gone), "more than was sent"
                leaving[destination], done = gone[count:], gone[:count]
                for received in done:
                    assert end[destination, received] <= end[rank, action], str(received)


def test_a_deadlock_is_refused():
    for text in (
        CHAIN.replace("0SEND_F0,", ""),
        CHAIN.replace("0SEND_F0,0RECV_B0,0B0", "0RECV_B0,0B0,0SEND_F0"),
    ):
        with pytest.raises(ValueError, match="deadlocks: rank 0 waits"):
            acknowledged(Schedule.from_csv(text))
