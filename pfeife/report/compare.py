"""Predicted against measured: what a plan promised, beside what happened."""

import statistics
from collections.abc import Sequence

import attrs

from pfeife.data.schedule import Action
from pfeife.data.timeline import MemoryCurve, Timeline


@attrs.frozen
class Compared:
    """One figure of a prediction and of a measurement, both in seconds or both in bytes.

    `action` is None for a total, `rank` None for a figure of all ranks.
    """

    rank: int | None
    action: Action | None
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Predicted over measured; 1 where nothing was predicted and nothing measured."""
        if self.measured:
            return self.predicted / self.measured
        return float("inf") if self.predicted else 1.0


def compare_times(predicted: Timeline, *measured: Timeline) -> tuple[Compared, ...]:
    """The step first, then every action of every rank: predicted seconds and the median of the
    measured steps'. Raises ValueError if the timelines have other actions."""
    # An action has one event in a step: rank and action tell it from all others.
    expected = {(e.rank, e.action): e.end - e.start for e in predicted.events}
    seconds_of: dict[tuple[int, Action], list[float]] = {key: [] for key in expected}
    for timeline in measured:
        actions = {(e.rank, e.action): e.end - e.start for e in timeline.events}
        _check(set(expected), set(actions))
        for key, seconds in actions.items():
            seconds_of[key].append(seconds)
    # The median, since the first steps and those that something else has held up last longer.
    whole = statistics.median(timeline.seconds for timeline in measured)
    rows = [Compared(None, None, predicted.seconds, whole)]
    for (rank, action), seconds in expected.items():
        rows.append(Compared(rank, action, seconds, statistics.median(seconds_of[rank, action])))
    return tuple(rows)


def compare_memory(
    predicted: Sequence[MemoryCurve], measured: Sequence[MemoryCurve]
) -> tuple[Compared, ...]:
    """Every rank's peak first, then the peak of every action (without what is held all the
    time), in bytes. Raises ValueError if the curves have other ranks or actions."""
    rows = []
    for predicted_curve, measured_curve in zip(predicted, measured, strict=True):
        _check(
            *(
                {(curve.rank, p.action) for p in curve.points}
                for curve in (predicted_curve, measured_curve)
            )
        )
        rows.append(Compared(predicted_curve.rank, None, predicted_curve.peak, measured_curve.peak))
    for predicted_curve, measured_curve in zip(predicted, measured, strict=True):
        # Those of actions are without what is held all the time, the totals above with it.
        peaks = {point.action: point.peak for point in measured_curve.points}
        rows += [
            Compared(predicted_curve.rank, p.action, p.peak, peaks[p.action])
            for p in predicted_curve.points
        ]
    return tuple(rows)


def _check(expected: set[tuple[int, Action]], actual: set[tuple[int, Action]]) -> None:
    if expected != actual:
        # Actions have no order; by their texts the same one is named at every run.
        rank, action = min(expected ^ actual, key=str)
        where = "predicted" if (rank, action) in expected else "measured"
        raise ValueError(f"only {where}: rank {rank}, action {action}; compare the same schedule")
