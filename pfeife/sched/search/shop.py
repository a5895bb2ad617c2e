"""A problem as numbered operations; a schedule as one order of operations per rank.

Microbatches are interchangeable: within one (kind, stage) they run in ascending order, so an
order is a sequence of (kind, stage) tokens. Operation (kind * stages + stage) * microbatches + k
is the k-th of its token; the kinds are F, I and W. A stage whose backward is better left whole has
it as its I, and no W.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import attrs

from pfeife.data.schedule import Action, Do, Schedule
from pfeife.lowering.problem import Problem

Orders = list[list[int]]


@attrs.frozen
class Shop:
    """A compiled problem. `readers[token]` has (token, seconds) of what waits for a token's end
    on whichever rank; `sources[token]` the same seen from the other end."""

    problem: Problem
    microbatches: int
    stages: int
    ranks: int
    home: tuple[int, ...]  # of a token
    seconds: tuple[float, ...]  # of a token
    takes: tuple[float, ...]  # bytes that the begin of a token takes
    frees: tuple[float, ...]  # bytes that the end of a token frees
    whole: tuple[bool, ...]  # of a stage
    readers: tuple[tuple[tuple[int, float], ...], ...]
    sources: tuple[tuple[tuple[int, float], ...], ...]
    memory: tuple[float, ...]  # of a rank, a millionth more than asked for

    @property
    def operations(self) -> int:
        return sum(2 + (not whole) for whole in self.whole) * self.microbatches

    def tokens_of(self, rank: int) -> tuple[int, ...]:
        """The tokens that a rank has to run, those without W left out."""
        return tuple(
            token
            for token, at in enumerate(self.home)
            if at == rank and not (token >= 2 * self.stages and self.whole[token % self.stages])
        )


def compile_problem(problem: Problem) -> Shop:
    """Numbers for the inner loops."""
    stages, count = problem.stages, len(problem.stages)
    home = problem.stage_ranks
    whole = tuple(not s.splittable or s.weight_backward == 0 for s in stages)
    back = [s.backward if w else s.input_backward for s, w in zip(stages, whole, strict=True)]
    kept = [0.0 if w else s.kept for s, w in zip(stages, whole, strict=True)]
    readers: list[list[tuple[int, float]]] = [[] for _ in range(3 * count)]
    sources: list[list[tuple[int, float]]] = [[] for _ in range(3 * count)]
    for e in problem.edges:
        crosses = home[e.source] != home[e.destination]
        for a, b, lag in (
            (e.source, e.destination, e.forward_seconds),
            (count + e.destination, count + e.source, e.backward_seconds),
        ):
            readers[a].append((b, lag if crosses else 0.0))
            sources[b].append((a, lag if crosses else 0.0))
    limits = problem.memory or (math.inf,) * problem.ranks
    return Shop(
        problem=problem,
        microbatches=problem.microbatches,
        stages=count,
        ranks=problem.ranks,
        home=home * 3,
        seconds=(*(s.forward for s in stages), *back, *(s.weight_backward for s in stages)),
        takes=(*(s.saved for s in stages), *(0.0,) * (2 * count)),
        frees=(*(0.0,) * count, *(s.saved - k for s, k in zip(stages, kept, strict=True)), *kept),
        whole=whole,
        readers=tuple(map(tuple, readers)),
        sources=tuple(map(tuple, sources)),
        memory=tuple(limit * (1 + 1e-6) for limit in limits[: problem.ranks]),
    )


def orders_of(shop: Shop, schedule: Schedule) -> Orders:
    """A schedule's orders; a whole backward of a stage that can be split comes as I and W.

    Raises ValueError if it does not run the problem's microbatches once each.
    """
    m, count = shop.microbatches, shop.stages
    orders: Orders = []
    for rank in range(shop.ranks):
        done = [0] * (3 * count)
        order = []
        for action in schedule.ranks[rank] if rank < len(schedule.ranks) else ():
            whole = shop.whole[action.stage]
            kinds = {
                Do.FORWARD: (0,),
                Do.BACKWARD: (1,) if whole else (1, 2),
                Do.INPUT_BACKWARD: (1,),
                Do.WEIGHT_BACKWARD: () if whole else (2,),
            }[action.do]
            for kind in kinds:
                token = kind * count + action.stage
                order.append(token * m + done[token])
                done[token] += 1
        if sorted(order) != sorted(t * m + k for t in shop.tokens_of(rank) for k in range(m)):
            raise ValueError(f"rank {rank} of the schedule does not run what the problem asks")
        orders.append(order)
    return orders


def starts_of(shop: Shop, orders: Orders) -> list[float] | None:
    """When every operation starts (by number), each as early as it can; None for a deadlock.

    Transfers take their time, but do not wait for one another.
    """
    m, seconds, sources = shop.microbatches, shop.seconds, shop.sources
    end: list[float] = [-1.0] * (3 * shop.stages * m)
    starts = [0.0] * len(end)
    clock, at = [0.0] * shop.ranks, [0] * shop.ranks
    waiting = list(range(shop.ranks))
    blocked: dict[int, int] = {}
    while waiting:
        rank = waiting.pop()
        order, now, index = orders[rank], clock[rank], 0
        for index in range(at[rank], len(order)):
            operation = order[index]
            token, k = divmod(operation, m)
            missing = -1
            for source, lag in sources[token]:
                arrives = end[source * m + k]
                if arrives < 0:
                    missing = source * m + k
                    break
                if arrives + lag > now:
                    now = arrives + lag
            if missing >= 0:
                blocked[rank] = missing
                break
            starts[operation] = now
            now += seconds[token]
            end[operation] = now
        else:
            index = len(order)
        clock[rank], at[rank] = now, index
        for other in [o for o, what in blocked.items() if end[what] >= 0]:
            del blocked[other]
            waiting.append(other)
    return None if blocked else starts


def length_of(shop: Shop, starts: Sequence[float], orders: Orders) -> float:
    """Seconds until the last operation ends."""
    m = shop.microbatches
    return max((starts[o[-1]] + shop.seconds[o[-1] // m] for o in orders if o), default=0.0)


def respects(shop: Shop, orders: Orders) -> bool:
    """Whether the orders keep to the memory, and to F before I before W."""
    m, count = shop.microbatches, shop.stages
    for rank, order in enumerate(orders):
        held, done = 0.0, [0] * (3 * count)
        for operation in order:
            token = operation // m
            held += shop.takes[token]
            if held > shop.memory[rank]:
                return False
            held -= shop.frees[token]
            done[token] += 1
            if token >= count and done[token] > done[token - count]:
                return False
    return True


def schedule_of(shop: Shop, orders: Orders) -> Schedule:
    """Actions of the orders; an I with its W right behind becomes a B where no rank ends later.

    Raises ValueError if the orders deadlock.
    """
    m, count = shop.microbatches, shop.stages
    late = _latest(shop, orders)
    names = [Do.FORWARD] * count
    names += [Do.BACKWARD if whole else Do.INPUT_BACKWARD for whole in shop.whole]
    names += [Do.WEIGHT_BACKWARD] * count
    merged = _merged(shop, orders, late)
    ranks = []
    for order in orders:
        actions = []
        for operation in order:
            token, k = divmod(operation, m)
            if operation in merged:
                actions.append(Action(token % count, Do.BACKWARD, k))
            elif operation - count * m not in merged or token < 2 * count:
                actions.append(Action(token % count, names[token], k))
        ranks.append(tuple(actions))
    return Schedule(tuple(ranks))


def _in_time(shop: Shop, orders: Orders) -> tuple[list[float], list[int]]:
    """Starts, and all operations in an order in which each comes after what it waits for."""
    starts = starts_of(shop, orders)
    if starts is None:
        raise ValueError("the orders deadlock")
    place = {o: index for order in orders for index, o in enumerate(order)}
    m = shop.microbatches
    waits = {o: len(shop.sources[o // m]) + (place[o] > 0) for o in place}
    ready = [o for o in place if not waits[o]]
    result = []
    while ready:
        operation = ready.pop()
        result.append(operation)
        token, k = divmod(operation, m)
        after = [reader * m + k for reader, _ in shop.readers[token]]
        order = orders[shop.home[token]]
        after += order[place[operation] + 1 : place[operation] + 2]
        for other in after:
            waits[other] -= 1
            if not waits[other]:
                ready.append(other)
    assert len(result) == len(place)
    return starts, result


def _latest(shop: Shop, orders: Orders) -> dict[int, float]:
    """When every operation must start at the latest for the step to end when it does."""
    starts, sorted_ = _in_time(shop, orders)
    m, end = shop.microbatches, length_of(shop, starts, orders)
    following = {a: b for order in orders for a, b in pairwise(order)}
    late: dict[int, float] = {}
    for operation in reversed(sorted_):
        token, k = divmod(operation, m)
        limit = late[following[operation]] if operation in following else end
        for reader, lag in shop.readers[token]:
            limit = min(limit, late[reader * m + k] - lag)
        late[operation] = limit - shop.seconds[token]
    return late


def _merged(shop: Shop, orders: Orders, late: dict[int, float]) -> set[int]:
    """The I that may run together with the W behind them."""
    m, count = shop.microbatches, shop.stages
    _, sorted_ = _in_time(shop, orders)
    following = {a: b for order in orders for a, b in pairwise(order)}
    before = {b: a for a, b in following.items()}
    sent: dict[int, float] = {}  # when the readers get it
    free: dict[int, float] = {}
    merged: set[int] = set()
    for operation in sorted_:
        token, k = divmod(operation, m)
        start = free[before[operation]] if operation in before else 0.0
        for source, lag in shop.sources[token]:
            start = max(start, sent[source * m + k] + lag)
        free[operation] = sent[operation] = start + shop.seconds[token]
        if token // count == 1 and following.get(operation) == operation + count * m:
            whole = free[operation] + shop.seconds[token + count]
            slack = 1e-9 * whole
            if all(whole + lag <= late[r * m + k] + slack for r, lag in shop.readers[token]):
                merged.add(operation)
                sent[operation] = whole
    return merged
