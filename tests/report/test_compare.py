"""Predicted beside measured: times and bytes, by action and in total."""

import pytest

from pfeife import report
from pfeife.data import plain
from pfeife.data.schedule import parse_action
from pfeife.data.timeline import Event, MemoryCurve, MemoryPoint, Timeline
from pfeife.report import compare_memory, compare_times


def timeline(*ends: float) -> Timeline:
    """Two actions of one rank."""
    first, last = ends
    return Timeline(
        (
            Event(0, parse_action("0F0"), 0.0, first),
            Event(0, parse_action("0B0"), first, last),
        )
    )


def test_times_are_compared_by_action_and_in_total():
    rows = compare_times(timeline(1.0, 3.0), timeline(2.0, 4.0), timeline(2.0, 5.0))
    assert [(r.rank, r.action and str(r.action)) for r in rows] == [
        (None, None),
        (0, "0F0"),
        (0, "0B0"),
    ]
    assert [(r.predicted, r.measured) for r in rows] == [(3.0, 4.5), (1.0, 2.0), (2.0, 2.5)]
    assert rows[1].ratio == 0.5
    text = report.comparison_table(compare_times(timeline(0.0015, 0.003), timeline(0.002, 0.004)))
    assert "3.00 ms" in text and "0.750" in text and "0F x 1" in text


def test_what_ran_must_be_what_was_predicted():
    other = Timeline((Event(0, parse_action("0F0"), 0.0, 1.0),))
    with pytest.raises(ValueError, match="only predicted: rank 0, action 0B0"):
        compare_times(timeline(1.0, 2.0), other)
    with pytest.raises(ValueError, match="only measured: rank 0, action 0B0"):
        compare_times(other, timeline(1.0, 2.0))


def test_memory_is_compared_by_action_and_in_total():
    action = parse_action("0F0")
    one = MemoryCurve(0, {"parameters": 10}, (MemoryPoint(action, 6, 4),))
    other = MemoryCurve(0, {"parameters": 10}, (MemoryPoint(action, 10, 4),))
    total, single = compare_memory([one], [other])
    assert (total.predicted, total.measured, total.ratio) == (16, 20, 0.8)
    assert (single.action, single.predicted, single.measured) == (action, 6, 10)
    assert "16 B" in report.comparison_table((total, single))
    assert plain.from_json(MemoryCurve, plain.to_json(one)) == one
