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
    before the send, and then it lasts from the start of the send; a reduction after what was
    before it on the last rank that came to it. `occupied` and `overhead` are those of `simulate`:

        rank 0   F0 SEND F1 ...                 the path:  F0 of rank 0,
        rank 1      ~~~~~~~~ RECV F0 B0                    RECV (with ~), F0 and B0 of rank 1
    """
    # A walk from the end. As a longest path of networkx it would need a graph of all actions,
    # which takes about a kilobyte for each of them.
    ranks: dict[int, list[Event]] = {}
    makers: dict[Action, list[tuple[float, int, int]]] = {}  # start, rank and place
    for event in timeline.events:
        mine, action = ranks.setdefault(event.rank, []), event.action
        mine.append(event)
        if action.do in SENDS or action.do == Do.REDUCE_GRAD:
            made = received_as(action) if action.do in SENDS else action
            makers.setdefault(made, []).append((event.start, event.rank, len(mine) - 1))
    path: list[Event] = []
    rank = max(ranks, key=lambda rank: ranks[rank][-1].end, default=0)
    at = len(ranks.get(rank, ())) - 1
    while at >= 0:
        event = ranks[rank][at]
        start, action = event.start, event.action
        if action.do == Do.REDUCE_GRAD or (
            action.do in RECEIVES and event.end > start + occupied(action) + overhead
        ):
            start, rank, at = max(makers[action])
        path.append(attrs.evolve(event, start=start))
        at -= 1
    return Timeline(tuple(reversed(path)))
