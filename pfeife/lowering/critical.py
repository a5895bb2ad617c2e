"""What a step waits for: the chain of actions and messages that takes as long as the step."""

import attrs

from pfeife.data.schedule import RECEIVES, SENDS, Action, Do, received_as
from pfeife.data.timeline import Event, Timeline
from pfeife.lowering.simulate import Seconds, nothing


def critical_path(
    timeline: Timeline, occupied: Seconds = nothing, overhead: float = 0.0
) -> Timeline:
    """The events of a simulated step that follow one another, without a gap, until it ends.

    An action comes after the one before it on its rank; a receive that had to wait after what was
    before the send, and then it lasts from the start of the send; a reduction after the one before
    it, or what was before it, on the last rank that came to it. `occupied` and `overhead` are
    those of `simulate`:

        rank 0   F0 SEND F1 ...                 the path:  F0 of rank 0,
        rank 1      ~~~~~~~~ RECV F0 B0                    RECV (with ~), F0 and B0 of rank 1
    """
    walk = _Walk(timeline, occupied, overhead)
    path: list[Event] = []
    while walk.at is not None:
        path.append(walk.back())
    return Timeline(tuple(reversed(path)))


class _Walk:
    """A way back through a timeline, at the event of a rank in its order. As a longest path of
    networkx it would need a graph of all actions, about a kilobyte for each of them."""

    def __init__(self, timeline: Timeline, occupied: Seconds, overhead: float):
        self.occupied, self.overhead = occupied, overhead
        self.ranks: dict[int, list[Event]] = {}
        self.sent: dict[Action, tuple[int, int]] = {}  # by their receives
        self.begun: dict[Action, list[tuple[int, int]]] = {}  # where reductions are
        self.before: dict[tuple[int, int], int] = {}  # the reduction before one, on its rank
        last: dict[int, int] = {}
        for event in timeline.events:
            events, action = self.ranks.setdefault(event.rank, []), event.action
            place = event.rank, len(events)
            events.append(event)
            if action.do in SENDS:
                self.sent[received_as(action)] = place
            elif action.do == Do.REDUCE_GRAD:
                self.begun.setdefault(action, []).append(place)
                if event.rank in last:
                    self.before[place] = last[event.rank]
                last[event.rank] = place[1]
        ends = ((e.end, r, at) for r, events in self.ranks.items() for at, e in enumerate(events))
        latest = max(ends, default=None)
        self.at = latest and latest[1:]
        self.ended = True  # whether what comes next waits for a reduction's end, or its beginning

    def back(self) -> Event:
        """The event that one is at; then one is at what comes before it."""
        assert self.at is not None
        rank, at = self.at
        event = self.ranks[rank][at]
        if event.action.do == Do.REDUCE_GRAD:
            if self.ended:
                return self._reduction(event)
            # the path has what the reduction took of the rank's time: the rest of it ran beside
            event = attrs.evolve(event, end=self._goes_on(event))
        elif event.action.do in RECEIVES and event.end > self._goes_on(event):
            rank, at = self.sent[event.action]
            event = attrs.evolve(event, start=self.ranks[rank][at].start)
        self._go(rank, at - 1, ended=False)
        return event

    def _reduction(self, event: Event) -> Event:
        """A reduction until its end, from where the last rank comes to it."""
        came = []
        for rank, at in self.begun[event.action]:
            events, before = self.ranks[rank], self.before.get((rank, at))
            came.append((events[at].start, False, rank, at - 1))
            if before is not None:
                came.append((events[before].end, True, rank, before))
        start, ended, rank, at = max(came)
        self._go(rank, at, ended)
        return attrs.evolve(event, start=start)

    def _goes_on(self, event: Event) -> float:
        """When a rank goes on after an event that does not keep it waiting."""
        return event.start + self.occupied(event.action) + self.overhead

    def _go(self, rank: int, at: int, ended: bool) -> None:
        self.at, self.ended = (rank, at) if at >= 0 else None, ended
