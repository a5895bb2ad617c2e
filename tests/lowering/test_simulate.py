"""Simulated steps: by hand, and by what must come before what."""

from hypothesis import given, settings
from hypothesis import strategies as st
from orders import flow, lowered, placed, unit

from pfeife.data.schedule import RECEIVES, SENDS, Action, Do, received_as
from pfeife.lowering.replay import replay
from pfeife.lowering.simulate import simulate
from pfeife.lowering.verify import verify_schedule
from pfeife.sched.families import gpipe, naive


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
