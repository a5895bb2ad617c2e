"""An event-driven run of a schedule in simulated time."""

from collections import Counter
from collections.abc import Callable

from pfeife.data.schedule import RECEIVES, SENDS, Action, Do, Schedule, received_as
from pfeife.data.timeline import Event, Timeline

REDUCE = Do.REDUCE_GRAD
Seconds = Callable[[Action], float]


def _nothing(action: Action) -> float:
    return 0.0


def simulate(
    schedule: Schedule, seconds: Seconds, overhead: float = 0.0, occupied: Seconds = _nothing
) -> Timeline:
    """The timeline of a lowered schedule whose every action takes `seconds(action)`.

    A rank does one thing at a time. A send's seconds are those of the transfer, and a channel
    (pair of ranks, one direction) carries one transfer at a time; a receive waits for the
    arrival. Of their ranks' time they take what `occupied` says, a receive only where the rank
    has not waited as long anyway. A reduction begins on all ranks that have it together.
    `overhead` seconds of the rank come to every action. Raises ValueError if the schedule
    deadlocks.
    """
    run = _Run(schedule, seconds, overhead, occupied)
    waiting = {rank: iter(actions) for rank, actions in enumerate(schedule.ranks)}
    next_of = {rank: next(actions, None) for rank, actions in waiting.items()}
    moved = True
    while moved:
        moved = False
        for rank, actions in waiting.items():
            while (action := next_of[rank]) is not None and run.advance(rank, action):
                next_of[rank] = next(actions, None)
                moved = True
    if any(action is not None for action in next_of.values()):
        raise ValueError("the schedule deadlocks; verify_schedule says where")
    return Timeline(tuple(run.events))


class _Run:
    """The clocks of ranks and channels while a schedule runs."""

    def __init__(self, schedule: Schedule, seconds: Seconds, overhead: float, occupied: Seconds):
        self.home, self.seconds, self.overhead = schedule.stage_ranks, seconds, overhead
        self.occupied = occupied
        self.sharing = Counter(a for rank in schedule.ranks for a in rank if a.do == REDUCE)
        self.joined: dict[Action, dict[int, float]] = {}
        self.clock = [0.0] * len(schedule.ranks)
        self.free: dict[tuple[int, int], float] = {}
        self.arrival: dict[Action, float] = {}
        self.events: list[Event] = []

    def advance(self, rank: int, action: Action) -> bool:
        """Does an action of a rank, if what it waits for has happened."""
        start = self.clock[rank]
        if action.do in SENDS:
            assert action.peer is not None
            channel = (rank, self.home[action.peer])
            arrives = max(start, self.free.get(channel, 0.0)) + self.seconds(action)
            self.free[channel] = self.arrival[received_as(action)] = arrives
            self.clock[rank] = start + self.occupied(action) + self.overhead
        elif action.do in RECEIVES:
            if action not in self.arrival:
                return False
            ready = max(start + self.occupied(action), self.arrival[action])
            self.clock[rank] = ready + self.overhead
        elif action.do == REDUCE:
            joined = self.joined.setdefault(action, {})
            joined[rank] = start
            if len(joined) < self.sharing[action]:
                return False
            self.clock[rank] = max(joined.values()) + self.seconds(action) + self.overhead
        else:
            self.clock[rank] = start + self.seconds(action) + self.overhead
        self.events.append(Event(rank, action, start, self.clock[rank]))
        return True
