"""A scheduling problem in bare numbers, and the judge of its schedules."""

import math
from collections import defaultdict
from collections.abc import Callable

import attrs

from pfeife.data import checks
from pfeife.data.schedule import SENDS, Action, Do, Schedule
from pfeife.lowering.lower import Transfer, transfers_between
from pfeife.lowering.replay import replay


@attrs.frozen
class StageCosts:
    """One stage and one microbatch: seconds of its parts, bytes of what they keep.

    `saved` bytes are held from the start of the forward until the end of the input-backward,
    `kept` bytes from there until the end of the weight-backward. A stage that is not
    `splittable` runs its backward whole, in the sum of the two times.
    """

    forward: float = attrs.field(validator=checks.seconds)
    input_backward: float = attrs.field(validator=checks.seconds)
    weight_backward: float = attrs.field(validator=checks.seconds)
    saved: float = attrs.field(default=0.0, validator=checks.finite)
    kept: float = attrs.field(default=0.0, validator=checks.finite)
    splittable: bool = True

    @property
    def backward(self) -> float:
        """Seconds of a whole backward."""
        return self.input_backward + self.weight_backward

    @property
    def seconds(self) -> float:
        """Seconds of all of it, forward and backward."""
        return self.forward + self.backward

    def of(self, do: Do) -> float:
        """Seconds of an action of computation."""
        return {
            Do.FORWARD: self.forward,
            Do.BACKWARD: self.backward,
            Do.INPUT_BACKWARD: self.input_backward,
            Do.WEIGHT_BACKWARD: self.weight_backward,
        }[do]

    def freed(self, do: Do) -> float:
        """Bytes that are free when an action of a backward ends."""
        return {
            Do.BACKWARD: self.saved,
            Do.INPUT_BACKWARD: self.saved - self.kept,
            Do.WEIGHT_BACKWARD: self.kept,
        }[do]


@attrs.frozen
class Edge:
    """`source` sends to the later stage `destination` in the forward, and gets a gradient back."""

    source: int
    destination: int
    forward_seconds: float = attrs.field(default=0.0, validator=checks.seconds)
    backward_seconds: float = attrs.field(default=0.0, validator=checks.seconds)


@attrs.frozen
class Problem:
    """Stages on ranks, and how many microbatches run through them.

    The seconds of an edge count only between different ranks. `memory` has the bytes of
    activations that fit on every rank, None if there is no limit.
    """

    stages: tuple[StageCosts, ...]
    stage_ranks: tuple[int, ...]
    microbatches: int
    edges: tuple[Edge, ...]
    memory: tuple[float, ...] | None = attrs.field(
        default=None, validator=checks.each(checks.not_negative)
    )

    def __attrs_post_init__(self) -> None:
        count = len(self.stages)
        if not all(type(rank) is int for rank in self.stage_ranks):
            raise ValueError(f"Problem.stage_ranks: {self.stage_ranks} are no numbers of ranks")
        if not count or len(self.stage_ranks) != count or min(self.stage_ranks) < 0:
            raise ValueError(f"{count} stages on ranks {self.stage_ranks}")
        if type(self.microbatches) is not int or self.microbatches < 1:
            raise ValueError(
                f"Problem.microbatches={self.microbatches!r}: there is at least one, and none in "
                "part"
            )
        self._check_sums()
        if self.memory is not None and len(self.memory) < self.ranks:
            raise ValueError(f"{len(self.memory)} memory limits for {self.ranks} ranks")
        for stage, costs in enumerate(self.stages):
            if costs.kept > costs.saved:
                raise ValueError(f"stage {stage} keeps {costs.kept} of {costs.saved} saved bytes")
        pairs = [(edge.source, edge.destination) for edge in self.edges]
        if len(set(pairs)) < len(pairs):
            raise ValueError(f"an edge is there twice: {sorted(pairs)}")
        for source, destination in pairs:
            if not 0 <= source < destination < count:
                raise ValueError(f"edge {source} -> {destination} of {count} stages")

    def _check_sums(self) -> None:
        """One after the other, all that there is takes finite seconds, and keeps finite bytes."""
        seconds = sum(stage.seconds for stage in self.stages)
        seconds += sum(edge.forward_seconds + edge.backward_seconds for edge in self.edges)
        saved = sum(stage.saved for stage in self.stages)
        for total, field in ((seconds, "seconds"), (saved, "saved bytes")):
            if total * self.microbatches == math.inf:
                raise ValueError(
                    f"Problem.stages: the {field} of {self.microbatches} microbatches add up to "
                    "more than a float holds"
                )

    @property
    def ranks(self) -> int:
        """How many ranks the stages are on."""
        return 1 + max(self.stage_ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on a rank, in ascending order."""
        return tuple(s for s, at in enumerate(self.stage_ranks) if at == rank)

    def smallest_memory(self, rank: int) -> float:
        """Bytes that one microbatch alone needs on a rank, all stages being in a chain."""
        return sum(self.stages[s].saved for s in self.stages_of(rank))


def chain_edges(
    stages: int, forward_seconds: float = 0.0, backward_seconds: float | None = None
) -> tuple[Edge, ...]:
    """Every stage sends to the next one."""
    back = forward_seconds if backward_seconds is None else backward_seconds
    return tuple(Edge(s, s + 1, forward_seconds, back) for s in range(stages - 1))


def transfers(problem: Problem) -> tuple[Transfer, ...]:
    """What goes between ranks, in the order in which one stage sends."""
    edges = [(edge.source, edge.destination) for edge in problem.edges]
    return transfers_between(edges, problem.stage_ranks)


def seconds_of(problem: Problem) -> Callable[[Action], float]:
    """How long actions take, transfers too, as `simulate` asks for it."""
    sent = {(e.source, Do.SEND_F, e.destination): e.forward_seconds for e in problem.edges}
    sent |= {(e.destination, Do.SEND_B, e.source): e.backward_seconds for e in problem.edges}

    def seconds(action: Action) -> float:
        if action.do in SENDS:
            assert action.peer is not None
            return sent[action.stage, action.do, action.peer]
        return problem.stages[action.stage].of(action.do)

    return seconds


def peak_memory(problem: Problem, schedule: Schedule) -> tuple[float, ...]:
    """The most bytes of activations that every rank holds at a time."""
    peaks = []
    for actions in schedule.ranks:
        held = peak = 0.0
        for action in actions:
            costs = problem.stages[action.stage]
            if action.do == Do.FORWARD:
                held += costs.saved
                peak = max(peak, held)
            elif action.do.kind:
                # What an action frees it still needs while it runs, so the peak is before.
                held -= costs.freed(action.do)
        peaks.append(peak)
    return tuple(peaks)


def fits(problem: Problem, schedule: Schedule) -> bool:
    """Whether a schedule keeps to the memory of every rank (a millionth is rounding)."""
    if problem.memory is None:
        return True
    peaks = peak_memory(problem, schedule)
    return all(
        peak <= limit * (1 + 1e-6) for peak, limit in zip(peaks, problem.memory, strict=False)
    )


def makespan(problem: Problem, schedule: Schedule) -> float:
    """Seconds until the last rank is done; what `simulate` says of the lowered schedule, several
    times as fast, for searches ask it of every candidate.

    Raises ValueError if the schedule deadlocks, or does not belong to the problem.
    """
    _check_belongs(problem, schedule)
    run = _Run(problem)
    replay(schedule.ranks, run.advance)
    return max(run.clock)


def _check_belongs(problem: Problem, schedule: Schedule) -> None:
    count = 0
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if not action.do.kind or action.stage >= len(problem.stages):
                raise ValueError(f"{action} is no computation of the problem's stages")
            if problem.stage_ranks[action.stage] != rank:
                raise ValueError(
                    f"{action} on rank {rank}; the problem has stage {action.stage} on rank "
                    f"{problem.stage_ranks[action.stage]}"
                )
            if action.do == Do.INPUT_BACKWARD and not problem.stages[action.stage].splittable:
                raise ValueError(f"{action}: the backward of stage {action.stage} cannot be split")
            count += action.do in (Do.FORWARD, Do.BACKWARD, Do.WEIGHT_BACKWARD)
    if count != 2 * len(problem.stages) * problem.microbatches:
        raise ValueError(
            f"the schedule does not run {problem.microbatches} microbatches of every stage once"
        )


class _Run:
    """Clocks and channels while a schedule of computations runs."""

    def __init__(self, problem: Problem):
        self.stages = problem.stages
        self.stage_ranks = stage_ranks = problem.stage_ranks
        self.clock = [0.0] * problem.ranks
        self.free: dict[tuple[int, int], float] = defaultdict(float)
        self.arrival: dict[tuple[int, int, int | None, bool], float] = {}
        self.inward: dict[tuple[int, bool], list[int]] = defaultdict(list)
        self.outward: dict[tuple[int, bool], list[tuple[int, tuple[int, int], float]]]
        self.outward = defaultdict(list)
        for e in problem.edges:
            for source, destination, forward, seconds in (
                (e.source, e.destination, True, e.forward_seconds),
                (e.destination, e.source, False, e.backward_seconds),
            ):
                channel = stage_ranks[source], stage_ranks[destination]
                self.inward[destination, forward].append(source)
                self.outward[source, forward].append((destination, channel, seconds))

    def advance(self, rank: int, action: Action) -> int | None:
        """Does an action if all that it reads is on its way, or says whose turn it is."""
        stage, k, forward = action.stage, action.microbatch, action.do == Do.FORWARD
        start = self.clock[rank]
        # a weight-backward reads what its own stage has kept, and nobody waits for it
        if action.do != Do.WEIGHT_BACKWARD:
            for source in self.inward[stage, forward]:
                arrival = self.arrival.get((source, stage, k, forward))
                if arrival is None:
                    return self.stage_ranks[source]
                start = max(start, arrival)
        end = self.clock[rank] = start + self.stages[stage].of(action.do)
        if action.do != Do.WEIGHT_BACKWARD:
            for destination, channel, seconds in self.outward[stage, forward]:
                arrives = end
                # on one rank nothing travels; between two, one message after another
                if channel[0] != channel[1]:
                    arrives = max(end, self.free[channel]) + seconds
                    self.free[channel] = arrives
                self.arrival[stage, destination, k, forward] = arrives
        return None
