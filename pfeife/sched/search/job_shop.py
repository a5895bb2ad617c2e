"""A problem as a job shop: numbered operations, and a schedule as one order of them per rank.

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
class JobShop:
    """A compiled problem: ranks are its machines, microbatches its jobs. `readers[token]` has
    (token, seconds) of what waits for a token's end on whichever rank, in the order in which it is
    sent; `sources[token]` the same seen from the other end."""

    problem: Problem
    microbatches: int
    stages: int
    ranks: int
    rank_of: tuple[int, ...]  # of a token
    seconds: tuple[float, ...]  # of a token
    takes: tuple[float, ...]  # bytes that the start of a token takes
    frees: tuple[float, ...]  # bytes that the end of a token frees
    whole: tuple[bool, ...]  # of a stage
    readers: tuple[tuple[tuple[int, float], ...], ...]
    sources: tuple[tuple[tuple[int, float], ...], ...]
    memory: tuple[float, ...]  # of a rank, a millionth more than asked for
    contended: bool  # whether a transfer may have to wait for another one on its channel

    @property
    def operations(self) -> int:
        """How many there are: every microbatch has F and I of each stage, and W where I is not
        whole."""
        return sum(2 + (not whole) for whole in self.whole) * self.microbatches

    def tokens_of(self, rank: int) -> tuple[int, ...]:
        """The tokens that a rank has to run, those without W left out."""
        return tuple(
            token
            for token, at in enumerate(self.rank_of)
            if at == rank and not (token >= 2 * self.stages and self.whole[token % self.stages])
        )


def compile_problem(problem: Problem) -> JobShop:
    """Numbers for the inner loops."""
    stages, count = problem.stages, len(problem.stages)
    rank_of = problem.stage_ranks * 3
    # A W that takes no time fills no wait: such backwards stay whole.
    whole = tuple(not s.splittable or s.weight_backward == 0 for s in stages)
    back = [s.backward if w else s.input_backward for s, w in zip(stages, whole, strict=True)]
    kept_bytes = [0.0 if w else s.kept for s, w in zip(stages, whole, strict=True)]
    seconds = (*(s.forward for s in stages), *back, *(s.weight_backward for s in stages))
    readers: list[list[tuple[int, float]]] = [[] for _ in range(3 * count)]
    sources: list[list[tuple[int, float]]] = [[] for _ in range(3 * count)]
    for e in problem.edges:
        crosses = rank_of[e.source] != rank_of[e.destination]
        for a, b, lag in (
            (e.source, e.destination, e.forward_seconds),
            (count + e.destination, count + e.source, e.backward_seconds),
        ):
            readers[a].append((b, lag if crosses else 0.0))
            sources[b].append((a, lag if crosses else 0.0))
    # Without a limit every comparison with it holds.
    limits = problem.memory or (math.inf,) * problem.ranks
    return JobShop(
        problem=problem,
        microbatches=problem.microbatches,
        stages=count,
        ranks=problem.ranks,
        rank_of=rank_of,
        seconds=seconds,
        takes=(*(s.saved for s in stages), *(0.0,) * (2 * count)),
        frees=(
            *(0.0,) * count,
            *(s.saved - k for s, k in zip(stages, kept_bytes, strict=True)),
            *kept_bytes,
        ),
        whole=whole,
        readers=tuple(map(tuple, readers)),
        sources=tuple(map(tuple, sources)),
        memory=tuple(limit * (1 + 1e-6) for limit in limits[: problem.ranks]),
        contended=_contended(rank_of, seconds, readers),
    )


def _contended(
    rank_of: Sequence[int], seconds: Sequence[float], readers: list[list[tuple[int, float]]]
) -> bool:
    """Whether some channel's longest transfer takes longer than the least time between two."""
    between: dict[tuple[int, int], float] = {}
    longest: dict[tuple[int, int], float] = {}
    for token, token_readers in enumerate(readers):
        for at, (reader, lag) in enumerate(token_readers):
            channel = (rank_of[token], rank_of[reader])
            if channel[0] != channel[1]:
                again = any(
                    rank_of[earlier] == rank_of[reader] for earlier, _ in token_readers[:at]
                )
                # Two messages of one operation over one channel set out at the same time.
                gap = 0.0 if again else seconds[token]
                between[channel] = min(between.get(channel, gap), gap)
                longest[channel] = max(longest.get(channel, 0.0), lag)
    return any(longest[channel] > between[channel] for channel in longest)


def orders_of(shop: JobShop, schedule: Schedule) -> Orders:
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


def starts_of(shop: JobShop, orders: Orders) -> list[float] | None:
    """When every operation starts (by number), each as early as it can; None for a deadlock.

    A channel (pair of ranks, one direction) carries one transfer at a time.
    """
    timed = in_time(shop, orders)
    return None if timed is None else timed[0]


def in_time(shop: JobShop, orders: Orders) -> tuple[list[float], list[int]] | None:
    """`starts_of`, and all operations in an order in which each comes after what it waits for.

    A rank runs until it misses something; the operation that makes it there wakes the rank.
    """
    m, seconds, readers, rank_of = shop.microbatches, shop.seconds, shop.readers, shop.rank_of
    size = 3 * shop.stages * m
    missing = [len(token_sources) for token_sources in shop.sources for _ in range(m)]
    arrived, starts = [0.0] * size, [0.0] * size
    clock, at = [0.0] * shop.ranks, [0] * shop.ranks
    free = [[0.0] * shop.ranks for _ in range(shop.ranks)]
    # By the operation that a rank misses, for whoever brings the last of what that waits for.
    sleeping: dict[int, int] = {}
    awake, result = list(range(shop.ranks)), []
    while awake:
        rank = awake.pop()
        order, now, channels = orders[rank], clock[rank], free[rank]
        for index in range(at[rank], len(order)):
            operation = order[index]
            if missing[operation]:
                sleeping[operation], at[rank] = rank, index
                break
            if arrived[operation] > now:
                now = arrived[operation]
            starts[operation] = now
            result.append(operation)
            token, k = divmod(operation, m)
            now += seconds[token]
            for reader, lag in readers[token]:
                dependent, arrives, to = reader * m + k, now, rank_of[reader]
                if to != rank:
                    arrives = (now if now > channels[to] else channels[to]) + lag
                    channels[to] = arrives
                if arrives > arrived[dependent]:
                    arrived[dependent] = arrives
                missing[dependent] -= 1
                if not missing[dependent] and dependent in sleeping:
                    awake.append(sleeping.pop(dependent))
        clock[rank] = now
    return None if sleeping else (starts, result)


def length_of(shop: JobShop, starts: Sequence[float], orders: Orders) -> float:
    """Seconds until the last operation ends."""
    m = shop.microbatches
    return max((starts[o[-1]] + shop.seconds[o[-1] // m] for o in orders if o), default=0.0)


def respects(shop: JobShop, orders: Orders) -> bool:
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


def schedule_of(shop: JobShop, orders: Orders, *, whole: bool = True) -> Schedule:
    """Actions of the orders; if `whole`, an I with its W right behind becomes a B where no rank
    ends later (were transfers not to wait for one another).

    Raises ValueError if the orders deadlock.
    """
    m, count = shop.microbatches, shop.stages
    names = [Do.FORWARD] * count
    names += [Do.BACKWARD if whole else Do.INPUT_BACKWARD for whole in shop.whole]
    names += [Do.WEIGHT_BACKWARD] * count
    merged = _merged(shop, orders) if whole else set()
    ranks = []
    for order in orders:
        actions = []
        for operation in order:
            token, k = divmod(operation, m)
            if operation in merged:
                actions.append(Action(token % count, Do.BACKWARD, k))
            elif token < 2 * count or operation - count * m not in merged:
                actions.append(Action(token % count, names[token], k))
        ranks.append(tuple(actions))
    return Schedule(tuple(ranks))


def _latest(
    shop: JobShop, orders: Orders, starts: Sequence[float], sequence: Sequence[int]
) -> list[float]:
    """When every operation must start at the latest for the step to end when it does."""
    m = shop.microbatches
    late = [length_of(shop, starts, orders)] * (len(starts) + 1)
    following = _next(orders, len(starts))
    for operation in reversed(sequence):
        token, k = divmod(operation, m)
        limit = late[following[operation]]
        for reader, lag in shop.readers[token]:
            limit = min(limit, late[reader * m + k] - lag)
        late[operation] = limit - shop.seconds[token]
    return late


def _next(orders: Orders, none: int) -> list[int]:
    """What comes right behind every operation in its order, else `none`."""
    following = [none] * (none + 1)
    for order in orders:
        for operation, behind in pairwise(order):
            following[operation] = behind
    return following


def _merged(shop: JobShop, orders: Orders) -> set[int]:
    """The I that may run together with the W behind them: what is sent later for it is still
    there in time."""
    timed = in_time(shop, orders)
    if timed is None:
        raise ValueError("the orders deadlock")
    m, count = shop.microbatches, shop.stages
    # What an I sends leaves at the end of the whole B, so later by the W. That costs nothing where
    # all that reads it may start so late; the slack that one B takes is gone for those after it,
    # so the times are made anew on the way.
    late = _latest(shop, orders, *timed)
    none = len(timed[0])
    following, before = _next(orders, none), _next([order[::-1] for order in orders], none)
    sent = [0.0] * (none + 1)  # when its result leaves
    free = [0.0] * (none + 1)  # when its rank is free
    merged: set[int] = set()
    for operation in timed[1]:
        token, k = divmod(operation, m)
        start = free[before[operation]]
        for source, lag in shop.sources[token]:
            start = max(start, sent[source * m + k] + lag)
        free[operation] = sent[operation] = start + shop.seconds[token]
        if count <= token < 2 * count and following[operation] == operation + count * m:
            whole = free[operation] + shop.seconds[token + count]
            slack = 1e-9 * whole
            if all(whole + lag <= late[r * m + k] + slack for r, lag in shop.readers[token]):
                merged.add(operation)
                sent[operation] = whole
    return merged
