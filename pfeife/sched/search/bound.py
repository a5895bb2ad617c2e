"""A lower bound of the makespan of a scheduling problem."""

import math
from heapq import heappop, heappush

from pfeife.lowering.problem import Problem
from pfeife.sched.search.shop import Shop, compile_problem


def lower_bound(problem: Problem) -> float:
    """Seconds that no schedule can beat, whatever the order: the greatest of

    - the longest path, with the memory's edges in it: where no more than K microbatches fit between
      F and I of a stage, F of one waits for I of the K-th before it;
    - per rank, Jackson's preemptive schedule of its operations between their heads and tails
      (Carlier, The one-machine sequencing problem, EJOR 1982);
    - per rank, the bytes times seconds that it must hold over the bytes that it has.
    """
    return bound_of(compile_problem(problem))


def bound_of(shop: Shop) -> float:
    """`lower_bound` of a compiled problem."""
    heads, tails = _heads(shop), _tails(shop)
    m, best = shop.microbatches, 0.0
    for rank in range(shop.ranks):
        jobs = [
            (heads[token][k], shop.seconds[token], tails[token][k])
            for token in shop.tokens_of(rank)
            for k in range(m)
        ]
        if jobs:
            best = max(best, preemptive(jobs), _area(shop, rank, heads, tails))
    return best


def preemptive(jobs: list[tuple[float, float, float]]) -> float:
    """The least maximum of end + tail over (head, seconds, tail) on one machine with preemption.

    The released job with the longest tail runs, in O(n log n).
    """
    jobs = sorted(jobs)
    now = best = 0.0
    waiting: list[tuple[float, float]] = []
    index = 0
    while index < len(jobs) or waiting:
        if not waiting:
            now = max(now, jobs[index][0])
        while index < len(jobs) and jobs[index][0] <= now:
            heappush(waiting, (-jobs[index][2], jobs[index][1]))
            index += 1
        tail, left = heappop(waiting)
        until = jobs[index][0] if index < len(jobs) else math.inf
        if now + left <= until:
            now += left
            best = max(best, now - tail)
        else:
            heappush(waiting, (tail, left - (until - now)))
            now = until
    return best


def _fitting(shop: Shop) -> list[int]:
    """Per stage how many microbatches fit between the begin of F and the end of I at a time.

    One that is there holds what the earlier stages of its rank saved, too, if it went through
    them and comes back to them: if a path leads from them to the stage.
    """
    reached = [{s} for s in range(shop.stages)]
    for s in range(shop.stages):
        for source, _ in shop.sources[s]:
            reached[s] |= reached[source]
    fitting = []
    for s in range(shop.stages):
        bytes_ = sum(shop.takes[o] for o in reached[s] if shop.home[o] == shop.home[s])
        memory = shop.memory[shop.home[s]]
        fitting.append(
            shop.microbatches if bytes_ * shop.microbatches <= memory else int(memory / bytes_)
        )
    return fitting


def _heads(shop: Shop) -> list[list[float]]:
    """The earliest start of every token's k-th operation.

    Besides what it reads it waits for the operations of its own rank that must be over: those of
    its token, and those of the same microbatch and earlier ones that lead to it.
    """
    m, count = shop.microbatches, shop.stages
    heads = [[0.0] * m for _ in range(3 * count)]
    fitting = _fitting(shop)
    before = _before(shop)
    running = [-math.inf] * (3 * count)
    order = [*range(count), *range(2 * count - 1, count - 1, -1), *range(2 * count, 3 * count)]
    for k in range(m):
        for token in order:
            head = 0.0
            for source, lag in shop.sources[token]:
                head = max(head, heads[source][k] + shop.seconds[source] + lag)
            if token >= count:
                own = token - count
                head = max(head, heads[own][k] + shop.seconds[own])
            if k:
                head = max(head, heads[token][k - 1] + shop.seconds[token])
            if token < count and k >= fitting[token]:
                freed = token + count
                head = max(head, heads[freed][k - fitting[token]] + shop.seconds[freed])
            mine, work = before[token]
            if mine:
                # From the earliest start of any of them on, all their work is done before this.
                earliest = min(heads[o][k] for o in mine)
                running[token] = max(running[token] + shop.seconds[token], earliest) + work
                head = max(head, running[token])
            heads[token][k] = head
    return heads


def _before(shop: Shop) -> list[tuple[tuple[int, ...], float]]:
    """Per token the others of its rank that come before it for the same microbatch; their work."""
    ancestors: list[set[int]] = [set() for _ in range(3 * shop.stages)]
    count = shop.stages
    order = [*range(count), *range(2 * count - 1, count - 1, -1), *range(2 * count, 3 * count)]
    for token in order:
        direct = {source for source, _ in shop.sources[token]}
        direct |= {token - count} if token >= count else set()
        ancestors[token] = direct.union(*(ancestors[d] for d in direct))
    result = []
    for token, found in enumerate(ancestors):
        mine = tuple(sorted(o for o in found if shop.home[o] == shop.home[token]))
        result.append((mine, sum(shop.seconds[o] for o in mine)))
    return result


def _tails(shop: Shop) -> list[list[float]]:
    """The least seconds from every operation's end to the end of the step, as `_heads`."""
    m, count = shop.microbatches, shop.stages
    tails = [[0.0] * m for _ in range(3 * count)]
    fitting = _fitting(shop)
    after: list[list[int]] = [[] for _ in range(3 * count)]
    for token, (mine, _) in enumerate(_before(shop)):
        for other in mine:
            after[other].append(token)
    work = [sum(shop.seconds[o] for o in found if not _absent(shop, o)) for found in after]
    running = [-math.inf] * (3 * count)
    order = [*range(2 * count, 3 * count), *range(count, 2 * count), *range(count - 1, -1, -1)]
    for k in reversed(range(m)):
        for token in order:
            if _absent(shop, token):
                continue
            tail = 0.0
            for reader, lag in shop.readers[token]:
                tail = max(tail, lag + shop.seconds[reader] + tails[reader][k])
            if token < 2 * count and not _absent(shop, token + count):
                tail = max(tail, shop.seconds[token + count] + tails[token + count][k])
            if k + 1 < m:
                tail = max(tail, shop.seconds[token] + tails[token][k + 1])
            stage = token - count
            if 0 <= stage < count and k + fitting[stage] < m:
                tail = max(tail, shop.seconds[stage] + tails[stage][k + fitting[stage]])
            behind = [o for o in after[token] if not _absent(shop, o)]
            if behind:
                least = min(tails[o][k] for o in behind)
                running[token] = max(running[token] + shop.seconds[token], least) + work[token]
                tail = max(tail, running[token])
            tails[token][k] = tail
    return tails


def _absent(shop: Shop, token: int) -> bool:
    return token >= 2 * shop.stages and shop.whole[token % shop.stages]


def _area(shop: Shop, rank: int, heads: list[list[float]], tails: list[list[float]]) -> float:
    """What a rank must hold, in bytes times seconds, over its bytes, between its ramps."""
    memory, count = shop.memory[rank], shop.stages
    if math.isinf(memory) or not memory:
        return 0.0
    held = 0.0
    stages = shop.problem.stages_of(rank)
    for s in stages:
        # heads[I][0] - heads[F][0] may be longer than needed: count the path of one microbatch.
        through = shop.seconds[s] + _round_trip(shop, s) + shop.seconds[s + count]
        kept = shop.frees[s + 2 * count]
        held += shop.takes[s] * through + kept * shop.seconds[s + 2 * count]
    first = min(heads[s][0] for s in stages)
    last = min(
        tails[t][shop.microbatches - 1]
        for s in stages
        for t in ((s + count,) if shop.whole[s] else (s + 2 * count,))
    )
    return first + held * shop.microbatches / memory + last


def _round_trip(shop: Shop, stage: int) -> float:
    """The least seconds between the end of a stage's F and the begin of its I."""
    count = shop.stages
    longest = {stage: shop.seconds[stage]}
    for s in range(stage + 1, count):
        arrivals = [longest[a] + lag for a, lag in shop.sources[s] if a in longest]
        if arrivals:
            longest[s] = max(arrivals) + shop.seconds[s]
    back = dict(longest)
    for s in sorted(longest, reverse=True):
        found = [back[a - count] + lag for a, lag in shop.sources[s + count] if a - count in back]
        begin = max([longest[s], *found])
        if s == stage:
            return begin - shop.seconds[stage]
        back[s] = begin + shop.seconds[s + count]
    raise AssertionError("unreachable")
