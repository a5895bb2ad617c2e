"""What a step takes, predicted or measured: seconds of its actions, bytes of its ranks."""

import attrs

from pfeife.data import checks
from pfeife.data.schedule import Action


@attrs.frozen
class Event:
    """One action of one rank with its start and end, in seconds since the step started."""

    rank: int = attrs.field(validator=checks.not_negative)
    action: Action
    start: float = attrs.field(validator=checks.seconds)
    end: float = attrs.field(validator=checks.seconds)

    def __attrs_post_init__(self) -> None:
        if not self.end >= self.start:
            raise ValueError(f"Event: {self.action} ends at {self.end}, starts at {self.start}")


@attrs.frozen
class Timeline:
    """What ran when, predicted or measured."""

    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """From the step's start to the end of the last action."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they compute nothing."""
        # Ranks without an event have no part in the step, and so none in its bubble.
        ranks = {event.rank for event in self.events}
        busy = sum(event.end - event.start for event in self.events if event.action.do.kind)
        return 1 - busy / (len(ranks) * self.seconds) if self.seconds else 0.0


@attrs.frozen
class MemoryPoint:
    """Bytes that a rank holds beside what it holds all the time: the most during an action, and
    after it."""

    action: Action
    peak: int
    after: int

    def __attrs_post_init__(self) -> None:
        if self.peak < self.after:
            raise ValueError(f"MemoryPoint: {self.action} leaves {self.after} bytes, over its peak")


@attrs.frozen
class MemoryCurve:
    """The bytes of one rank through a step, predicted or measured.

    `held` is what is there before and after, by what it is (parameters, buffers, batch,
    optimizer, receive buffers). `at_peak` says of a prediction what the rest is at its peak
    (gradients, saved, received, temporaries, outputs).
    """

    rank: int = attrs.field(validator=checks.not_negative)
    held: dict[str, int] = attrs.field(validator=checks.each(checks.not_negative))
    points: tuple[MemoryPoint, ...]
    at_peak: dict[str, int] = attrs.field(factory=dict, validator=checks.each(checks.not_negative))

    @property
    def peak(self) -> int:
        """The most bytes at any time of the step."""
        return sum(self.held.values()) + max((point.peak for point in self.points), default=0)
