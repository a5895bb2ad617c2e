"""Cuts by the clusters at which their stages start, and the best of all by dynamic programming."""

import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate, pairwise, product
from typing import Any

import numpy as np

Cost = Callable[[int], np.ndarray]  # of a stage, between every two edges
_Join = Callable[[np.ndarray, np.ndarray], np.ndarray]


def stages_from(starts: Iterable[int], units: int) -> tuple[int, ...]:
    """The stage of every cluster, from the clusters at which the stages but the first start."""
    first = set(starts)
    return tuple(accumulate(int(unit in first) for unit in range(units)))


def borders(stage_of_cluster: Sequence[int]) -> tuple[int, ...]:
    """The clusters at which a new stage starts, the first left out."""
    return tuple(i + 1 for i, (a, b) in enumerate(pairwise(stage_of_cluster)) if a != b)


def open_borders(units: int, blocked: Collection[int]) -> list[int]:
    """The clusters at which a stage may start, the first left out."""
    return [border for border in range(1, units) if border not in blocked]


def between(before: np.ndarray) -> np.ndarray:
    """What lies between two edges, of what lies before each; endless unless the second comes after
    the first."""
    later = np.triu(np.ones((len(before),) * 2, dtype=bool), 1)
    return np.where(later, before - before[:, None], np.inf)


def evenest(edges: Sequence[int], stages: int, cost: Cost) -> list[int] | None:
    """Where the stages but the first start, such that the one that costs most costs as little as
    can be, and among such cuts the sum of squares is least: the worst alone decides the pace, but
    the most even cut is less at the mercy of wrong costs.

    `edges` are 0, the clusters at which stages may start, and the number of clusters;
    `cost(stage)[i, j]` is what a stage between two of them costs, endless where there can be none.
    None if every cut is endless.
    """
    slowest = worst_of(edges, stages, cost)
    if slowest is None:
        return None
    most = slowest[0]

    def allowed(stage: int) -> np.ndarray:
        costs = cost(stage)
        return np.where(costs <= most, costs, np.inf)

    even = _best(edges, stages, allowed, lambda row, costs: row + costs**2)
    return even and even[1]


def least(edges: Sequence[int], stages: int, cost: Cost) -> list[int] | None:
    """Where the stages but the first start, such that all together cost least."""
    best = _best(edges, stages, cost, np.add)
    return best and best[1]


def worst_of(edges: Sequence[int], stages: int, cost: Cost) -> tuple[float, list[int]] | None:
    """The least that the worst stage can cost, and where the stages but the first then start."""
    return _best(edges, stages, cost, np.maximum)


def _best(
    edges: Sequence[int], stages: int, cost: Cost, join: _Join
) -> tuple[float, list[int]] | None:
    """The least that `join` makes of the stages' costs, and where the stages but the first start.

    Row s has for every edge the best that s stages before it can be.

        edges   0    b1    b2    b3    end       cost(s)[i, j]: stage s between two edges
        row 1   0   cost  cost  cost  cost
        row 2        -    min over i of join(row 1 at edge i, cost(1)[i, j])
    """
    row, chosen = np.full(len(edges), np.inf), []
    row[0] = 0.0
    for stage in range(stages):
        table = join(row[:, None], cost(stage))
        chosen.append(table.argmin(0))
        row = table.min(0)
    at, starts = len(edges) - 1, []
    for before in reversed(chosen):
        at = int(before[at])
        starts.append(edges[at])
    # Found from the last stage on; the first one's start is no border.
    return (float(row[-1]), starts[-2::-1]) if math.isfinite(row[-1]) else None


def moved_to(
    edges: Sequence[int], starts: Sequence[int], moves: Iterable[tuple[int, int]]
) -> list[int] | None:
    """Where stages start when some of them are moved, by so many edges each; None where that is not
    between the ones before and after it. `edges` are 0, the clusters at which stages may start, and
    the number of clusters."""
    tried = list(starts)
    for at, step in moves:
        place = bisect_left(edges, tried[at]) + step
        if not 0 < place < len(edges) - 1:
            return None
        tried[at] = edges[place]
    rising = all(low < high for low, high in pairwise([0, *tried, edges[-1]]))
    return tried if rising else None


def moves_of(count: int, steps: Sequence[int], together: int = 1) -> list[list[tuple[int, int]]]:
    """Moves of so many borders by so many edges, one by one and up to so many neighbours
    together."""
    return [
        [(border, step) for border in range(at, min(at + neighbours, count))]
        for at, step, neighbours in product(range(count), steps, range(1, together + 1))
    ]


def clearly_less(cost: float, least: float) -> bool:
    """Whether rounding alone cannot have made a cost the smaller one."""
    return cost < least * (1 - 1e-9)


def climbed(
    starts: Sequence[int],
    least: Any,
    cost: Callable[[Sequence[int]], Any],
    edges: Sequence[int],
    moves: Sequence[Sequence[tuple[int, int]]],
    *,
    over: Callable[[], bool] = lambda: False,
    less: Callable[[Any, Any], bool] = operator.lt,
) -> list[int]:
    """Borders that cost `least`, moved as long as they cost less by one of the moves (each of some
    borders, by so many edges), until it is `over`."""
    best, moved = list(starts), True
    while moved:
        moved = False
        for move in moves:
            if over():
                return best
            tried = moved_to(edges, best, move)
            if tried is not None and less(total := cost(tried), least):
                best, least, moved = tried, total, True
    return best
