"""Orders in time: placements, and schedules from the times at which actions start."""

from collections.abc import Iterable, Sequence
from typing import Any

from pfeife.data.schedule import Action, Do, Schedule

# Actions with the times at which they start: numbers or tuples that compare.
Timed = Iterable[tuple[Any, Action]]


def looped(stages: int, ranks: int) -> tuple[int, ...]:
    """Stages dealt to the ranks in turn: 0, 1, ..., p-1, 0, 1, ..."""
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
    home = tuple(range(stages)) if ranks is None else tuple(ranks)
    if len(home) != stages:
        raise ValueError(f"{len(home)} placements for {stages} stages")
    if not stages or min(home) < 0:
        raise ValueError(f"stages on ranks {list(home)}: there is a stage, and ranks begin at 0")
    if microbatches < 1:
        raise ValueError(f"microbatches={microbatches}: a step has at least one")
    return home


def dealt(timed: Timed, home: Sequence[int]) -> Schedule:
    """Every rank runs the actions of its stages in the order of their times.

    Of actions that start at the same time the deeper stage's comes first. If every action starts
    later than what it reads, the schedule cannot deadlock on any placement, because all ranks
    keep to one common order.
    """
    order: list[list[Action]] = [[] for _ in range(1 + max(home))]
    for _, action in sorted(timed, key=lambda item: (item[0], -item[1].stage)):
        order[home[action.stage]].append(action)
    return Schedule(tuple(map(tuple, order)))


def unit_times(orders: Sequence[Sequence[Action]], stages: int) -> Timed:
    """When the actions of every rank's order start, if F, I and W take one second and B two.

    The orders must be such that no rank waits for ever.
    """
    ends: dict[tuple[int, bool, int | None], int] = {}
    clock, waiting = [0] * len(orders), [list(reversed(order)) for order in orders]
    while any(waiting):
        left = sum(map(len, waiting))
        for rank, order in enumerate(waiting):
            while order and all(one in ends for one in _needs(order[-1], stages)):
                action = order.pop()
                start = max([clock[rank], *(ends[one] for one in _needs(action, stages))])
                yield start, action
                clock[rank] = start + (2 if action.do == Do.BACKWARD else 1)
                if action.do != Do.WEIGHT_BACKWARD:
                    forward = action.do == Do.FORWARD
                    ends[action.stage, forward, action.microbatch] = clock[rank]
        assert sum(map(len, waiting)) < left, "the orders wait for one another"


def _needs(action: Action, stages: int) -> list[tuple[int, bool, int | None]]:
    """The forwards (True) and backwards that an action of a chain of stages comes after."""
    stage, k = action.stage, action.microbatch
    if action.do == Do.FORWARD:
        return [(stage - 1, True, k)] if stage else []
    if action.do == Do.WEIGHT_BACKWARD:
        return [(stage, False, k)]
    return [(stage, True, k)] + ([(stage + 1, False, k)] if stage + 1 < stages else [])
