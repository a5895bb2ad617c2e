"""A lower bound of the makespan of a scheduling problem."""

import math
from collections.abc import Collection, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from pfeife.lowering.problem import Problem
from pfeife.sched.search.job_shop import JobShop, compile_problem


def lower_bound(problem: Problem) -> float:
    """Seconds that no schedule can beat, whatever the order: the greatest of

    - the longest path, with the memory's edges in it: where no more than K microbatches fit between
      F and I of a stage, F of one waits for I of the K-th before it;
    - per rank, Jackson's preemptive schedule of its operations between their heads and tails
      (Carlier, The one-machine sequencing problem, EJOR 1982);
    - per rank, the bytes times seconds that it must hold over the bytes that it has.
    """
    return bound_of(compile_problem(problem))


def bound_of(shop: JobShop) -> float:
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
    # A job that is interrupted waits with what is left of it. Whoever may not interrupt is no
    # faster, so this is a bound for schedules of whole operations.
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


def _fitting(shop: JobShop) -> list[int]:
    """Per stage how many microbatches fit between the start of F and the end of I at a time, one
    in any case.

    One that is there holds what the earlier stages of its rank saved, too, if it went through
    them and comes back to them: if a path leads from them to the stage.
    """
    reached = [{s} for s in range(shop.stages)]
    for s in range(shop.stages):
        for source, _ in shop.sources[s]:
            reached[s] |= reached[source]
    fitting = []
    for s in range(shop.stages):
        bytes_ = sum(shop.takes[o] for o in reached[s] if shop.rank_of[o] == shop.rank_of[s])
        memory = shop.memory[shop.rank_of[s]]
        all_fit = bytes_ * shop.microbatches <= memory
        fitting.append(shop.microbatches if all_fit else max(1, int(memory / bytes_)))
    return fitting


class _Step(NamedTuple):
    """What the k-th operation of a token comes after: the k-th of `links` by so many seconds, and
    its own one before; where `memory` has (token, back, seconds), that token's (k - back)-th too;
    and all `work` of its rank that must lie between the first of `roots` and it."""

    token: int
    seconds: float
    links: tuple[tuple[int, float], ...]
    memory: tuple[int, int, float] | None
    roots: tuple[int, ...]
    work: float


def _heads(shop: JobShop) -> list[list[float]]:
    """The earliest start of every token's k-th operation.

        stage s      F0  F1  F2 ...  I0 ...        room for two microbatches:
                                      +---> F2     no F2 before the end of I0

    Besides what it reads it waits for the operations of its own rank that must be over: those of
    its token, and those of the same microbatch and earlier ones that lead to it. One machine does
    them one after the other: from the earliest start of any of them on, all their work is done.
    """
    return _longest(_steps(shop, _in_order(shop), shop.sources, _before(shop), -shop.stages), shop)


def _tails(shop: JobShop) -> list[list[float]]:
    """The least seconds from every operation's end to the end of the step: heads seen from the
    other end, in which every operation is as late as its reader allows."""
    tokens, before = _in_order(shop)[::-1], _before(shop)
    behind = [[o for o in tokens if token in before[o]] for token in range(3 * shop.stages)]
    rows = _longest(_steps(shop, tokens, shop.readers, behind, shop.stages), shop)
    # In these rows microbatches count from the last one.
    return [row[::-1] for row in rows]


def _steps(
    shop: JobShop,
    tokens: Sequence[int],
    links: Sequence[Sequence[tuple[int, float]]],
    nearer: Sequence[Collection[int]],
    kind: int,
) -> list[_Step]:
    """What the tokens come after, seen from one end of the step: the `links` of each, the others of
    its rank that are `nearer` to that end, and its stage's token of the kind (F, I, W) that is
    `kind` away."""
    seconds, fitting, steps = shop.seconds, _fitting(shop), []
    for token in tokens:
        near, far, others = token + kind, token - kind, nearer[token]
        after = [(other, seconds[other] + lag) for other, lag in links[token]]
        after += [(near, seconds[near])] if near in tokens else []
        # From the start an F waits for the I that makes room for it, from the end it is the I.
        waits = token // shop.stages == (kind > 0)
        memory = (far, fitting[token % shop.stages], seconds[far]) if waits else None
        roots = [o for o in others if not any(a in others for a in nearer[o])]
        work = sum(seconds[o] for o in others)
        steps.append(_Step(token, seconds[token], tuple(after), memory, tuple(roots), work))
    return steps


def _in_order(shop: JobShop) -> list[int]:
    """Tokens so that each comes after what it reads, those without operations left out."""
    count = shop.stages
    order = [*range(count), *range(2 * count - 1, count - 1, -1), *range(2 * count, 3 * count)]
    return [o for o in order if o < 2 * count or not shop.whole[o - 2 * count]]


def _longest(steps: Sequence[_Step], shop: JobShop) -> list[list[float]]:
    """By token and k the longest path to its start."""
    rows: list[list[float]] = []
    row = [-math.inf] * (3 * shop.stages)
    running = [-math.inf] * (3 * shop.stages)  # when all work up to the (k-1)-th is done
    for k in range(shop.microbatches):
        last, row = row, [0.0] * (3 * shop.stages)
        for token, seconds, links, memory, roots, work in steps:
            head = last[token] + seconds
            for predecessor, lag in links:
                if row[predecessor] + lag > head:
                    head = row[predecessor] + lag
            if memory is not None and k >= memory[1]:
                head = max(head, rows[k - memory[1]][memory[0]] + memory[2])
            # Between the first root of microbatch j and this lie the rank's work of j to k and
            # this token's own of j to k - 1. `running` is the latest end of that over all j:
            #     first[j] + (k - j + 1) * work + (k - j) * seconds
            if roots:
                done, first = running[token] + seconds, row[roots[0]]
                for predecessor in roots[1:]:
                    first = min(first, row[predecessor])
                running[token] = done = (done if done > first else first) + work
                head = done if done > head else head
            row[token] = head if head > 0.0 else 0.0
        rows.append(row)
    return [list(column) for column in zip(*rows, strict=True)]


def _before(shop: JobShop) -> list[frozenset[int]]:
    """Per token the others of its rank that come before it for the same microbatch."""
    # By way of other ranks, too: F of a rank's second stage comes after F of its first one.
    ancestors: list[set[int]] = [set() for _ in range(3 * shop.stages)]
    for token in _in_order(shop):
        direct = {source for source, _ in shop.sources[token]}
        direct |= {token - shop.stages} if token >= shop.stages else set()
        ancestors[token] = direct.union(*(ancestors[d] for d in direct))
    return [
        frozenset(o for o in tokens if shop.rank_of[o] == shop.rank_of[token])
        for token, tokens in enumerate(ancestors)
    ]


def _area(shop: JobShop, rank: int, heads: list[list[float]], tails: list[list[float]]) -> float:
    """What a rank must hold, in bytes times seconds, over its bytes, between its ramps."""
    # A microbatch holds its bytes at least for as long as it takes alone, so the area under the
    # rank's curve of bytes is known; a curve below the memory needs so long for it:
    #
    #     memory - - -+-----------------+- - -     first: before its earliest F it holds nothing
    #                /|  area / memory  |\         last: after its latest W neither
    #         first / |                 | \ last
    memory, count = shop.memory[rank], shop.stages
    if math.isinf(memory) or not memory:
        return 0.0
    held = 0.0
    stages = shop.problem.stages_of(rank)
    for s in stages:
        # heads[I][0] - heads[F][0] may be longer than needed: count the path of one microbatch.
        through = shop.seconds[s] + _round_trip(shop, s) + shop.seconds[s + count]
        kept_bytes = shop.frees[s + 2 * count]
        held += shop.takes[s] * through + kept_bytes * shop.seconds[s + 2 * count]
    first = min(heads[s][0] for s in stages)
    last = min(
        tails[t][shop.microbatches - 1]
        for s in stages
        for t in ((s + count,) if shop.whole[s] else (s + 2 * count,))
    )
    return first + held * shop.microbatches / memory + last


def _round_trip(shop: JobShop, stage: int) -> float:
    """The least seconds between the end of a stage's F and the start of its I."""
    count = shop.stages
    longest = {stage: shop.seconds[stage]}
    for s in range(stage + 1, count):
        arrivals = [longest[a] + lag for a, lag in shop.sources[s] if a in longest]
        if arrivals:
            longest[s] = max(arrivals) + shop.seconds[s]
    back = dict(longest)
    for s in sorted(longest, reverse=True):
        gradients = [
            back[a - count] + lag for a, lag in shop.sources[s + count] if a - count in back
        ]
        start = max([longest[s], *gradients])
        if s == stage:
            return start - shop.seconds[stage]
        back[s] = start + shop.seconds[s + count]
    raise AssertionError("unreachable")
