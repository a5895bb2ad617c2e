"""Orders in time: placements, and schedules from the times at which actions start."""

from collections.abc import Iterable, Sequence
from typing import Any

from pfeife.data.schedule import Action, Do, Schedule
from pfeife.lowering.replay import replay

# Actions with the times at which they start: numbers or tuples that compare.
Timed = Iterable[tuple[Any, Action]]


def looped(stages: int, ranks: int) -> tuple[int, ...]:
    """Stages assigned to the ranks in turn: 0, 1, ..., p-1, 0, 1, ..."""
    return tuple(stage % ranks for stage in range(stages))


def folded(stages: int, ranks: int) -> tuple[int, ...]:
    """Stages laid down the ranks and up again: 0, ..., p-1, p-1, ..., 0, 0, ... (a V for 2p)."""
    return tuple(min(s % (2 * ranks), 2 * ranks - 1 - s % (2 * ranks)) for s in range(stages))


def halves(stages: int) -> int:
    """The ranks of a V that has two stages on each, the last stage's rank perhaps one."""
    return (stages + 1) // 2


def placed(stages: int, microbatches: int, ranks: Sequence[int] | None) -> tuple[int, ...]:
    """The stages' ranks: one stage a rank unless `ranks` places them.

    Raises ValueError for a placement of another number of stages, and without stages or
    microbatches.
    """
    stage_ranks = tuple(range(stages)) if ranks is None else tuple(ranks)
    if len(stage_ranks) != stages:
        raise ValueError(f"{len(stage_ranks)} placements for {stages} stages")
    if not stages or min(stage_ranks) < 0:
        raise ValueError(
            f"stages on ranks {list(stage_ranks)}: there is a stage, and ranks start at 0"
        )
    if microbatches < 1:
        raise ValueError(f"microbatches={microbatches}: a step has at least one")
    return stage_ranks


def assign(timed: Timed, stage_ranks: Sequence[int]) -> Schedule:
    """Every rank runs the actions of its stages in the order of their times.

    Of actions that start at the same time the deeper stage's comes first. If every action starts
    later than what it reads, the schedule cannot deadlock on any placement, because all ranks
    keep to one common order.
    """
    order: list[list[Action]] = [[] for _ in range(1 + max(stage_ranks))]
    for _, action in sorted(timed, key=lambda pair: (pair[0], -pair[1].stage)):
        order[stage_ranks[action.stage]].append(action)
    return Schedule(tuple(map(tuple, order)))


def unit_times(orders: Sequence[Sequence[Action]], stages: int) -> Timed:
    """When the actions of every rank's order start, if F, I and W take one second and B two.

    Raises ValueError if ranks wait for one another for ever.
    """
    stage_ranks = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    ends: dict[tuple[int, bool, int | None], int] = {}
    clock, timed = [0] * len(orders), []

    def advance(rank: int, action: Action) -> int | None:
        needs = _needs(action, stages)
        # The rank that has to go on first, for `replay`.
        for need in needs:
            if need not in ends:
                return stage_ranks[need[0]]
        start = max([clock[rank], *(ends[need] for need in needs)])
        timed.append((start, action))
        clock[rank] = start + (2 if action.do == Do.BACKWARD else 1)
        if action.do != Do.WEIGHT_BACKWARD:
            ends[action.stage, action.do == Do.FORWARD, action.microbatch] = clock[rank]
        return None

    replay(orders, advance)
    return timed


def _needs(action: Action, stages: int) -> list[tuple[int, bool, int | None]]:
    """The forwards (True) and backwards that an action of a chain of stages comes after."""
    stage, k = action.stage, action.microbatch
    if action.do == Do.FORWARD:
        return [(stage - 1, True, k)] if stage else []
    if action.do == Do.WEIGHT_BACKWARD:
        return [(stage, False, k)]
    return [(stage, True, k)] + ([(stage + 1, False, k)] if stage + 1 < stages else [])
