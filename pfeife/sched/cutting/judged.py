"""Cuts judged by the step that they make: its seconds, and what its messages take."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, combinations, pairwise

import attrs

from pfeife.lowering.problem import Problem
from pfeife.sched.cutting.balanced import Cutter
from pfeife.sched.cutting.borders import borders, clearly_less, climbed, moves_of, stages_from

# Seconds are estimates, whose errors are larger (benchmarks/fidelity.py); bytes are exact.
MESSAGE_TOLERANCE = 0.01
SLACKS = (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)  # of the slowest stage
STEPS = (-1, 1, -2, 2, -3, 3, -4, 4)  # edges by which a border moves
_MOST = 150_000  # operations of schedules that are run to judge cuts: a second or two


@attrs.frozen
class Score:
    """What a step counts as, against the seconds of a first one and of its messages: shorter is
    better, and so is a step that is longer by up to a `tolerance` (a fraction), by as much of that
    as its messages take less.

    Where a step of 100 ms has messages of 10 ms, one of 100.8 ms is better by a tolerance of 1 %
    if its messages take 1 ms: 1.008 + 0.001 < 1 + 0.01.
    """

    seconds: float
    messages: float
    tolerance: float

    def of(self, seconds: float, messages: float) -> float:
        """Less is better."""
        share = messages / self.messages if self.messages else 0.0
        return seconds / (self.seconds or 1.0) + self.tolerance * share


def checked_tolerance(fraction: float) -> float:
    """A tolerance. Raises ValueError unless it is a fraction of a step."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction < 1:
        raise ValueError(
            f"message_tolerance={fraction!r}: must be from 0 to 1, such as 0.01 for 1 % of the step"
        )
    return float(fraction)


def message_seconds(problem: Problem) -> float:
    """What all messages of a microbatch take, each over its own link: bytes, of which those on
    slow links count more."""
    ranks = problem.stage_ranks
    between = (e for e in problem.edges if ranks[e.source] != ranks[e.destination])
    return sum(edge.forward_seconds + edge.backward_seconds for edge in between)


def best_cut(
    cutter: Cutter,
    more: Iterable[tuple[int, ...]],
    judge: Callable[[tuple[int, ...]], tuple[float, float]],
    tolerance: float,
    operations: int,
) -> tuple[int, ...]:
    """The cut that counts least (see `Score`) against the fastest one, of those of a cutter and
    `more`, the borders of both moved one by one as long as that helps. The cutter's own, whose
    slowest stage is the fastest, stands where it is longer by no more than the tolerance and
    another one counts less by no more than a fifth of it: it is less at the mercy of wrong costs.

    `judge` has the seconds of a cut's step and of its messages, and looks at so many `operations`
    for them: what is tried depends on their number, not on a clock. Raises ValueError as
    `Cutter.even` does.
    """
    first, most = cutter.even(), _MOST // max(operations, 1)
    judgements: dict[tuple[int, ...], tuple[float, float]] = {}

    def judged(cut: tuple[int, ...]) -> tuple[float, float]:
        if cut not in judgements:
            judgements[cut] = judge(cut)
        return judgements[cut]

    for cut in chain((first,), _others(cutter, more)):
        if len(judgements) > most:
            break
        judged(cut)

    def least(counted: Callable[[tuple[int, ...]], float]) -> tuple[int, ...]:
        return _moved(cutter, min(judgements, key=counted), counted, lambda: len(judgements) > most)

    # First the fastest step of all, then, against its figures, the one that counts least.
    fastest = judged(least(lambda cut: judged(cut)[0]))
    score = Score(*fastest, tolerance)
    chosen = least(lambda cut: score.of(*judged(cut)))
    alike = score.of(*judgements[first]) <= score.of(*judgements[chosen]) + tolerance / 5
    return first if alike and judgements[first][0] <= fastest[0] * (1 + tolerance) else chosen


def _others(cutter: Cutter, more: Iterable[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    for cut in more:
        if cutter.lacking(borders(cut)) <= 0:
            yield cut
    for slack in SLACKS:
        quiet = cutter.quiet(slack)
        if quiet is not None:
            yield quiet


def _moved(
    cutter: Cutter,
    cut: tuple[int, ...],
    counted: Callable[[tuple[int, ...]], float],
    over: Callable[[], bool],
) -> tuple[int, ...]:
    """The cut with borders moved until nothing helps or it is `over`: one by one, and, where the
    same two ranks have several, two of them in opposite directions, which leaves the ranks as much
    to do as they have."""

    def cost(starts: Sequence[int]) -> float:
        return math.inf if cutter.lacking(starts) > 0 else counted(stages_from(starts, len(cut)))

    moves = _moves(cutter.stage_ranks)
    moved = climbed(
        borders(cut), counted(cut), cost, cutter.edges, moves, over=over, less=clearly_less
    )
    return stages_from(moved, len(cut))


def _moves(stage_ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Of borders alone, and of pairs of them between the same two ranks."""
    pairs = [frozenset(pair) for pair in pairwise(stage_ranks)]
    together = [
        [(first, step), (second, -step)]
        for first, second in combinations(range(len(pairs)), 2)
        if pairs[first] == pairs[second]
        for step in STEPS
    ]
    return moves_of(len(pairs), STEPS) + together
