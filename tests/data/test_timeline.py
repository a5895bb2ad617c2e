"""Timelines: what they count."""

from pfeife.data.schedule import Action, Do
from pfeife.data.timeline import Event, Timeline


def test_timeline_counts():
    """The bubble counts computation alone, over all ranks until the last end."""
    events = (
        Event(0, Action(0, Do.FORWARD, 0), 0.0, 2.0),
        Event(0, Action(0, Do.RECV_B, 0, 1), 2.0, 4.0),
        Event(1, Action(1, Do.FORWARD, 0), 2.0, 4.0),
    )
    timeline = Timeline(events)
    assert timeline.seconds == 4.0 and timeline.bubble == 0.5
    assert Timeline(()).seconds == Timeline(()).bubble == 0.0
