"""An event-driven run of a schedule in simulated time."""

from collections.abc import Callable

from pfeife.plan import RECEIVES, SENDS, Action, Event, Schedule, Timeline, received_as

Seconds = Callable[[Action], float]


def simulate(schedule: Schedule, seconds: Seconds, overhead: float = 0.0) -> Timeline:
    """The timeline of a lowered schedule whose every action takes `seconds(action)`.

    A rank does one thing at a time. A send costs the rank nothing: its seconds are those of the
    transfer, and a channel (pair of ranks, one direction) carries one transfer at a time. A
    receive waits for the arrival. `overhead` seconds of the rank come to every action. Raises
    ValueError if the schedule deadlocks.
    """
    run = _Run(schedule, seconds, overhead)
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

    def __init__(self, schedule: Schedule, seconds: Seconds, overhead: float):
        self.home, self.seconds, self.overhead = schedule.stage_ranks, seconds, overhead
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
            self.clock[rank] = start + self.overhead
        elif action.do in RECEIVES:
            if action not in self.arrival:
                return False
            self.clock[rank] = max(start, self.arrival[action]) + self.overhead
        else:
            self.clock[rank] = start + self.seconds(action) + self.overhead
        self.events.append(Event(rank, action, start, self.clock[rank]))
        return True
