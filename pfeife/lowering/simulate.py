"""An event-driven run of a schedule in simulated time."""

import warnings
from collections.abc import Callable

from pfeife.data.schedule import RECEIVES, SENDS, Action, Do, Schedule
from pfeife.data.timeline import Event, Timeline
from pfeife.lowering.replay import Reductions, replay

Seconds = Callable[[Action], float]


def nothing(action: Action) -> float:
    """What actions take where they take none of their rank's time."""
    return 0.0


def simulate(
    schedule: Schedule, seconds: Seconds, overhead: float = 0.0, occupied: Seconds = nothing
) -> Timeline:
    """The timeline of a lowered schedule whose every action takes `seconds(action)`.

    A rank does one thing at a time. A send's seconds are those of the transfer, and a channel
    (pair of ranks, one direction) carries one transfer at a time; a receive waits for the
    arrival. Of their ranks' time they take what `occupied` says, a receive only where the rank
    has not waited as long anyway. A reduction starts on all ranks that have it together.
    `overhead` seconds of the rank come to every action. Raises ValueError if the schedule
    deadlocks. A schedule that is not lowered has no sends and receives: its ranks would not wait
    for one another, which a warning says; `insert_actions` puts in those of a `chain` of stages.

    >>> order = sched.families.one_f_one_b(2, 4)
    >>> full = insert_actions(order, chain(order))  # both of pfeife.lowering.lower
    >>> timeline = sched.simulate(full, lambda action: 1.0 if action.do.kind else 0.0)
    >>> timeline.seconds, round(timeline.bubble, 3)  # (p - 1) / (m + p - 1) is idle
    (10.0, 0.2)
    """
    if _apart(schedule):
        warnings.warn(
            "the schedule has no sends and receives, so that no rank waits for another: lower it "
            "first, with sched.lower(schedule, program)",
            stacklevel=2,
        )
    run = _Run(schedule, seconds, overhead, occupied)
    replay(schedule.ranks, run.advance)
    return Timeline(tuple(run.events))


def _apart(schedule: Schedule) -> bool:
    """Whether several ranks train, and nothing is between them."""
    every = {action.do for actions in schedule.ranks for action in actions}
    backwards = every & {Do.BACKWARD, Do.INPUT_BACKWARD}
    return sum(map(bool, schedule.ranks)) > 1 and bool(backwards) and all(do.kind for do in every)


class _Run:
    """The clocks of ranks and channels while a schedule runs."""

    def __init__(self, schedule: Schedule, seconds: Seconds, overhead: float, occupied: Seconds):
        self.stage_ranks, self.seconds, self.overhead = schedule.stage_ranks, seconds, overhead
        self.occupied = occupied
        self.reductions = Reductions[float](schedule)
        self.clock = [0.0] * len(schedule.ranks)
        self.free: dict[tuple[int, int], float] = {}
        # By the fields of the receive: to make or to hash an action takes longer than all the rest.
        self.arrival: dict[tuple, float] = {}
        self.events: list[Event] = []

    def advance(self, rank: int, action: Action) -> int | None:
        """Does an action of a rank, or says which rank it waits for."""
        start = self.clock[rank]
        if action.do in SENDS:
            assert action.peer is not None
            channel = (rank, self.stage_ranks[action.peer])
            arrives = max(start, self.free.get(channel, 0.0)) + self.seconds(action)
            received = (action.peer, SENDS[action.do], action.microbatch, action.stage)
            self.free[channel] = self.arrival[received] = arrives
            self.clock[rank] = start + self.occupied(action) + self.overhead
        elif action.do in RECEIVES:
            assert action.peer is not None
            received = (action.stage, action.do, action.microbatch, action.peer)
            if received not in self.arrival:
                return self.stage_ranks[action.peer]
            ready = max(start + self.occupied(action), self.arrival.pop(received))
            self.clock[rank] = ready + self.overhead
        elif action.do == Do.REDUCE_GRAD:
            missing = self.reductions.join(rank, action, start)
            if missing is not None:
                return missing
            together = max(self.reductions.brought[action])
            self.clock[rank] = together + self.seconds(action) + self.overhead
        else:
            self.clock[rank] = start + self.seconds(action) + self.overhead
        self.events.append(Event(rank, action, start, self.clock[rank]))
        return None
