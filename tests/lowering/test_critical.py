"""The critical path: by hand, and as long as the step."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import TWO, schedules, seconds

from pfeife import report
from pfeife.data.schedule import BESIDE, SENDS, Schedule, received_as
from pfeife.data.timeline import Timeline
from pfeife.lowering.critical import critical_path
from pfeife.lowering.simulate import simulate


def test_the_critical_path_by_hand():
    """A message lasts from its send, also while the channel carries another."""
    path = critical_path(simulate(Schedule.from_csv(TWO), seconds(3.0)))
    took_time = [e for e in path.events if e.end > e.start]
    assert [(e.rank, str(e.action), e.start, e.end) for e in took_time] == [
        *((0, "0F0", 0, 1), (0, "0F1", 1, 2)),
        *((1, "1RECV_F1", 2, 7), (1, "1F1", 7, 8)),
    ]
    reduced = Schedule.from_csv("0F0,0REDUCE_GRAD,0B0\n1F0,1REDUCE_GRAD,1B0,0REDUCE_GRAD\n")
    path = critical_path(simulate(reduced, seconds(0.0, 2.0)))
    assert " ".join(str(e.action) for e in path.events) == "1F0 1REDUCE_GRAD 0REDUCE_GRAD"
    lines = report.critical_table(path).splitlines()
    assert [line.split()[-1] for line in lines[2:]] == ["20.0%", "80.0%"]
    assert critical_path(Timeline(())).events == ()
    told = Schedule.from_csv("0UNSHARD,1UNSHARD,0F0,1F0\n")
    path = critical_path(simulate(told, lambda action: 2.0 if action.do in BESIDE else 1.0))
    assert " ".join(str(e.action) for e in path.events) == "0UNSHARD 1UNSHARD 1F0"


@settings(max_examples=60)
@given(schedules(), st.integers(0, 1000), st.sampled_from((0.0, 0.25)))
def test_the_critical_path_is_as_long_as_the_step(schedule, seed, overhead):
    """One event begins when the one before it ends, on its rank, where its message was sent, on the
    last rank that came to its reduction, or where its parameters are told."""
    drawn = random.Random(seed)
    times = {a: drawn.choice((0.0, 1.0, 10.0)) for rank in schedule.ranks for a in rank}
    busy = {a: drawn.choice((0.0, 1.0)) for rank in schedule.ranks for a in rank}
    timeline = simulate(schedule, times.__getitem__, overhead, busy.__getitem__)
    path = critical_path(timeline, busy.__getitem__, overhead).events
    assert path[0].start == 0 and path[-1].end == timeline.seconds
    assert all(a.end == b.start for a, b in pairwise(path))
    assert sum(e.end - e.start for e in path) == pytest.approx(timeline.seconds)
    starts_at = {(e.rank, e.action): e.start for e in timeline.events}
    for before, event in pairwise(path):
        made = {
            rank: time
            for (rank, action), time in starts_at.items()
            if action.do in SENDS and received_as(action) == event.action
        }
        if event.action.do in BESIDE:
            begun = {t for (_, a), t in starts_at.items() if a == event.action}
            assert event.start in begun or before.action.do in BESIDE
        else:
            starts = made | {event.rank: starts_at[event.rank, event.action]}
            assert starts[before.rank] == event.start
