"""An event-driven run of a schedule in simulated time."""

from collections.abc import Callable

from pfeife.data.schedule import RECEIVES, SENDS, Action, Do, Schedule
from pfeife.data.timeline import Event, Timeline
from pfeife.lowering.replay import Reductions, reduced, replay

Seconds = Callable[[Action], float]


def nothing(action: Action) -> float:
    """What actions take where they take none of their rank's time."""
    return 0.0


def simulate(
    schedule: Schedule, seconds: Seconds, overhead: float = 0.0, occupied: Seconds = nothing
) -> Timeline:
    """The timeline of a lowered schedule, as `sched.simulate` says; of one that is not without a
    warning: its ranks may be independent."""
    run = _Run(schedule, seconds, overhead, occupied)
    replay(schedule.ranks, run.advance)
    # In a second run: reductions run beside the rest and nothing of the step waits for them, so
    # that the first one knows when each rank comes to them, after all that it tells members.
    replay(reduced(schedule), run.reduce)
    return Timeline(tuple(run.events))


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
        # What a rank reduces runs beside what it computes, one reduction after another. By rank and
        # action: where its event is, and when the rank has begun it.
        self.begun: dict[tuple[int, Action], tuple[int, float]] = {}
        self.beside = [0.0] * len(schedule.ranks)  # until when it is busy so
        self.told: dict[int, float] = {}  # when a stage has the parameters that members keep

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
            # A rank that comes late finds the message there; what it takes of its own time stays.
            ready = max(start + self.occupied(action), self.arrival.pop(received))
            self.clock[rank] = ready + self.overhead
        elif action.do == Do.REDUCE_GRAD:
            self.clock[rank] = start + self.occupied(action) + self.overhead
            self.begun[rank, action] = len(self.events), start
        elif action.do == Do.UNSHARD:
            self.clock[rank] = start + self.occupied(action) + self.overhead
            end = max(start, self.beside[rank]) + self.seconds(action)
            self.beside[rank] = self.told[action.stage] = end
            self.events.append(Event(rank, action, start, end))
            return None
        else:
            start = max(start, self.told.get(action.stage, 0.0))
            self.clock[rank] = start + self.seconds(action) + self.overhead
        self.events.append(Event(rank, action, start, self.clock[rank]))
        return None

    def reduce(self, rank: int, action: Action) -> int | None:
        """Ends a reduction that a rank has begun, or says which rank it waits for."""
        at, begun = self.begun[rank, action]
        missing = self.reductions.join(rank, action, max(begun, self.beside[rank]))
        if missing is not None:
            return missing
        end = max(self.reductions.brought[action]) + self.seconds(action)
        self.beside[rank] = end
        self.events[at] = Event(rank, action, self.events[at].start, end)
        return None
