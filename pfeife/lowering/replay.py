"""Ranks run against one another, each in its own order: under verify, simulate and others."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import networkx as nx

from pfeife.data.schedule import Action, Do, Schedule

Step = TypeVar("Step")
Value = TypeVar("Value")


def replay(orders: Sequence[Sequence[Step]], advance: Callable[[int, Step], int | None]) -> None:
    """Runs the steps of every rank in their order, as soon as what they wait for has happened.

    `advance(rank, step)` does a step and returns None. If the step has to wait, it returns a rank
    that must go on first, and the step is asked for again when that rank has gone on:

        rank 0   F0  SEND  RECV B0       rank 0 waits for 1
        rank 1   RECV F0  B0  SEND       once 1 has gone on, 0 is asked again

    So a rank is asked about as often as something arrives, not as often as any rank does anything.
    Raises ValueError for a deadlock, with the circle of steps that wait for one another.
    """
    reached = [0] * len(orders)
    awaited: dict[int, int] = {}
    waiting: dict[int, list[int]] = {}  # for the rank that is the key
    ready = deque(range(len(orders)))
    while ready:
        rank = ready.popleft()
        order, at, blocker = orders[rank], reached[rank], None
        while at < len(order) and (blocker := advance(rank, order[at])) is None:
            at += 1
        # Only who waits for this rank is asked again: all ranks a round would be quadratic.
        if at > reached[rank]:
            reached[rank] = at
            ready.extend(waiting.pop(rank, ()))
        if blocker is not None:
            awaited[rank] = blocker
            waiting.setdefault(blocker, []).append(rank)
    # whoever still waits here waits for ever: no rank is left that could go on
    stuck = {rank: awaited[rank] for ranks in waiting.values() for rank in ranks}
    if stuck:
        raise ValueError(f"the schedule deadlocks: {_described(orders, reached, stuck)}")


def _described(
    orders: Sequence[Sequence[object]], reached: Sequence[int], stuck: dict[int, int]
) -> str:
    """Where the ranks of a circle wait; without one, those that wait for a rank that has ended."""
    place = {rank: f"rank {rank} waits at {around(orders[rank], reached[rank])}" for rank in stuck}
    waits = nx.DiGraph(sorted(stuck.items()))
    circle = next(nx.simple_cycles(waits), None)
    if circle is None:
        left = [rank for rank, blocker in sorted(stuck.items()) if blocker not in stuck]
        return "; ".join(f"{place[rank]} for rank {stuck[rank]}, which has ended" for rank in left)
    first = circle.index(min(circle))
    ranks = [*circle[first:], *circle[:first]]
    return f"{'; '.join(place[rank] for rank in ranks)}; each for the next, in a circle"


def around(steps: Sequence[object], index: int) -> str:
    """A step in brackets between its neighbours."""
    first = max(0, index - 2)
    near = enumerate(steps[first : index + 3], first)
    return " ".join(f"[{step}]" if at == index else str(step) for at, step in near)


class Reductions(Generic[Value]):
    """Which ranks have come to the reductions of a schedule, and what each has brought."""

    def __init__(self, schedule: Schedule):
        self.missing: dict[Action, set[int]] = {}
        self.brought: dict[Action, list[Value]] = {}
        for rank, actions in enumerate(schedule.ranks):
            for action in actions:
                if action.do == Do.REDUCE_GRAD:
                    self.missing.setdefault(action, set()).add(rank)

    def join(self, rank: int, action: Action, value: Value) -> int | None:
        """A rank comes to a reduction, or asks again; returns one that it waits for."""
        missing = self.missing[action]
        if rank in missing:
            missing.remove(rank)
            self.brought.setdefault(action, []).append(value)
        return min(missing, default=None)


def reduced(schedule: Schedule) -> list[list[Action]]:
    """What every rank reduces, in its order: one after another, beside what it computes."""
    return [
        [action for action in actions if action.do == Do.REDUCE_GRAD] for actions in schedule.ranks
    ]
