"""What a step waits for: the chain of actions and messages that takes as long as the step."""

from typing import NamedTuple

import attrs

from pfeife.data.schedule import BESIDE, RECEIVES, SENDS, Action, Do, received_as
from pfeife.data.timeline import Event, Timeline
from pfeife.lowering.simulate import Seconds, nothing


def critical_path(
    timeline: Timeline, occupied: Seconds = nothing, overhead: float = 0.0
) -> Timeline:
    """The events of a simulated step that follow one another, without a gap, until it ends.

    An action comes after the one before it on its rank; a receive that had to wait after what was
    before the send, and then it lasts from the start of the send; a reduction after the one before
    it, or what was before it, on the last rank that came to it; a computation that had to wait for
    parameters of other members after what tells these. `occupied` and `overhead` are
    those of `simulate`:

        rank 0   F0 SEND F1 ...                 the path:  F0 of rank 0,
        rank 1      ~~~~~~~~ RECV F0 B0                    RECV (with ~), F0 and B0 of rank 1
    """
    steps = _Steps(timeline, occupied, overhead)
    ends = ((e.end, r, at) for r, events in steps.ranks.items() for at, e in enumerate(events))
    latest = max(ends, default=None)
    place = _Place(*latest[1:], ended=True) if latest else None
    path: list[Event] = []
    while place is not None and place.at >= 0:
        event, place = steps.back(place)
        path.append(event)
    return Timeline(tuple(reversed(path)))


class _Place(NamedTuple):
    """An event of a rank, in its order; and whether what comes next waits for a reduction's end
    there, or its beginning."""

    rank: int
    at: int
    ended: bool


class _Steps:
    """The ways back through a timeline. As a longest path of networkx it would need a graph of all
    actions, about a kilobyte for each of them."""

    def __init__(self, timeline: Timeline, occupied: Seconds, overhead: float):
        self.occupied, self.overhead = occupied, overhead
        self.ranks: dict[int, list[Event]] = {}
        self.sent: dict[Action, tuple[int, int]] = {}  # by their receives
        self.begun: dict[Action, list[tuple[int, int]]] = {}  # where those are that run beside
        self.before: dict[tuple[int, int], int] = {}  # the one before such a one, on its rank
        last: dict[int, int] = {}
        for event in timeline.events:
            events, action = self.ranks.setdefault(event.rank, []), event.action
            place = event.rank, len(events)
            events.append(event)
            if action.do in SENDS:
                self.sent[received_as(action)] = place
            elif action.do in BESIDE:
                self.begun.setdefault(action, []).append(place)
                if event.rank in last:
                    self.before[place] = last[event.rank]
                last[event.rank] = place[1]

    def back(self, place: _Place) -> tuple[Event, _Place]:
        """The event at a place, as a part of the path, and the place of what comes before it."""
        rank, at, ended = place
        event = self.ranks[rank][at]
        if event.action.do in BESIDE:
            if ended:
                return self._beside(event)
            # the path has what the reduction took of the rank's time: the rest of it ran beside
            event = attrs.evolve(event, end=self._goes_on(event))
        elif event.action.do in RECEIVES and event.end > self._goes_on(event):
            rank, at = self.sent[event.action]
            event = attrs.evolve(event, start=self.ranks[rank][at].start)
        elif event.action.do.kind and (told := self._told_before(event)):
            return event, told
        return event, _Place(rank, at - 1, ended=False)

    def _told_before(self, event: Event) -> _Place | None:
        """Where a computation has waited for parameters."""
        for rank, at in self.begun.get(Action(event.action.stage, Do.UNSHARD), ()):
            if self.ranks[rank][at].end == event.start:
                return _Place(rank, at, ended=True)
        return None

    def _beside(self, event: Event) -> tuple[Event, _Place]:
        """A reduction, or what members are told, until its end, from where the last rank comes to
        it."""
        came = []
        for rank, at in self.begun[event.action]:
            events, before = self.ranks[rank], self.before.get((rank, at))
            came.append((events[at].start, False, rank, at - 1))
            if before is not None:
                came.append((events[before].end, True, rank, before))
        start, ended, rank, at = max(came)
        return attrs.evolve(event, start=start), _Place(rank, at, ended)

    def _goes_on(self, event: Event) -> float:
        """When a rank goes on after an event that does not keep it waiting."""
        return event.start + self.occupied(event.action) + self.overhead
