"""Schedules that repeat a pattern: every rank takes the F and I of its stages in turn.

A pattern has a slot for every F and I token; a rank runs them in the order of slot + microbatch,
whatever their times. These are the building blocks of Qi et al., Pipeline Parallelism with
Controllable Memory (NeurIPS 2024), with slots of their own for every stage, so that stages may be
unequal. W fill the gaps, and make room where F find no memory.
"""

from collections.abc import Sequence
from random import Random

import attrs

from pfeife.sched.search.dispatch import NEVER, Chooser, Dispatched, Floor, dispatch
from pfeife.sched.search.job_shop import JobShop


@attrs.frozen
class Pattern:
    """`slots` of F and I by token, in periods; W fill gaps of `gap` times their seconds, and go
    before F when more than `owed` of them wait on a rank. What is there may go before what has
    its turn and is not there if its own turn is at most `loose` periods later. `safe` patterns
    leave memory for what has started (see `Floor.room`), others rely on their order."""

    slots: tuple[float, ...]
    gap: float = 1.0
    owed: int = 1 << 30
    loose: float = 0.0
    safe: bool = False


def pattern_of(shop: JobShop, starts: Sequence[float], period: float | None = None) -> Pattern:
    """The pattern that a schedule's middle third comes closest to."""
    m = shop.microbatches
    # The ramps at the start and the end of a step have other distances.
    low, high = m // 3, max(m // 3 + 1, (2 * m + 2) // 3)
    if period is None:
        spans = [starts[t * m + high - 1] - starts[t * m + low] for t in range(2 * shop.stages)]
        period = sorted(spans)[len(spans) // 2] / max(1, high - 1 - low)
    period = period or 1.0
    slots = [
        sum(starts[t * m + k] / period - k for k in range(low, high)) / (high - low)
        for t in range(2 * shop.stages)
    ]
    return Pattern(tuple(slots))


def neighbour(shop: JobShop, pattern: Pattern, random: Random) -> Pattern:
    """The pattern with one or a few tokens elsewhere."""
    kind = random.random()
    if kind < 0.1:
        gap = max(0.0, random.choice((pattern.gap, 0.7)) + random.gauss(0, 0.3))
        return attrs.evolve(pattern, gap=gap)
    if kind < 0.15:
        return attrs.evolve(pattern, owed=random.choice((0, 1, 2, 3, 4, 6, 1 << 30)))
    slots = list(pattern.slots)
    count = shop.stages
    stage = random.randrange(count)
    if kind < 0.23:
        loose = random.choice((0.0, 0.3, 1.0, 2.0, pattern.loose + random.random(), 100.0))
        return attrs.evolve(pattern, loose=loose, safe=random.random() < 0.5)
    if kind < 0.4:
        # All of a rank's I, or F, or all that comes after a stage in the way of a microbatch.
        by = random.choice((-1.0, 1.0, random.gauss(0, 0.4)))
        after = random.choice(
            (
                [count + stage],
                list(range(stage, 2 * count)),
                list(range(count, count + stage + 1)),
                [t for t in range(count, 2 * count) if shop.rank_of[t] == shop.rank_of[stage]],
            )
        )
        for token in after:
            slots[token] += by
    else:
        for _ in range(1 + int(2 * random.random() ** 2)):
            token = random.randrange(2 * count)
            slots[token] += random.gauss(0, random.choice((0.2, 0.5, 1.5)))
    return attrs.evolve(pattern, slots=tuple(slots))


def pattern_schedule(shop: JobShop, pattern: Pattern) -> Dispatched:
    """What a pattern gives, up to where ranks wait for one another for ever."""
    floor = Floor(shop)
    return dispatch(floor, _chooser(floor, pattern))


# What has the least slot + microbatch has the turn, there or not; `now` the rank may take
#
#     slot   2.0   2.4   2.9   3.5         loose = 0.6: 2.4 may go before 2.0, 2.9 may not
#     there   -     x     x     x          loose = 0:   W fill the wait for 2.0, or the rank waits
#            turn
#
# so the order is the pattern's own where nothing is late, whatever the times.
def _chooser(floor: Floor, pattern: Pattern) -> Chooser:
    shop = floor.shop
    m, count, seconds, whole = shop.microbatches, shop.stages, shop.seconds, shop.whole
    ready, done, held, takes = floor.ready, floor.done, floor.held, shop.takes
    slots, gap, owed, loose = pattern.slots, pattern.gap, pattern.owed, pattern.loose
    safe, memory, room = pattern.safe, shop.memory, floor.room

    # The F or I with the least slot has its turn, whether it is there or not; what is there goes
    # before it by at most `loose`, and W fill the wait. An F without memory has no turn: it would
    # hold up the I that make room.
    def choose(rank: int, now: float) -> tuple[int, float]:
        turn = NEVER  # of all that is not blocked
        best, key = -1, NEVER
        best_w, key_w, waiting = -1, NEVER, 0
        soon = wake = NEVER  # when the turn's is there, and when the first of all
        stuck = False
        for s in floor.stages[rank]:
            k = done[s]
            i, w = s + count, s + 2 * count
            back = done[i]
            if k < m:
                at, slot = ready[s][k], slots[s] + k
                free = (
                    room(rank, s, memory[rank]) if safe else held[rank] + takes[s] <= memory[rank]
                )
                # No `wake` for an F without memory: what makes room ends on this rank, which is
                # then asked anyway.
                stuck = stuck or not free
                if free and slot < turn:
                    turn, soon = slot, at
                if free and at > now:
                    wake = at if at < wake else wake
                elif free and slot < key:
                    key, best = slot, s
            # An I only frees memory, so it always has its turn.
            if back < k:
                at, slot = ready[i][back], slots[i] + back
                if slot < turn:
                    turn, soon = slot, at
                if at > now:
                    wake = at if at < wake else wake
                elif slot < key:
                    key, best = slot, i
            if done[w] < back and not whole[s]:
                waiting += back - done[w]
                if done[w] < key_w:
                    key_w, best_w = done[w], w
        # Where something with an earlier slot has the turn and is not there, the rank rather waits;
        # and W that are owed hold back F alone, since no rank waits for those.
        if best >= 0 and key <= turn + loose and (best >= count or waiting <= owed):
            return best, now
        # The wait counts until the turn is there (`soon`), whatever else comes before it (`wake`).
        if best_w >= 0 and (stuck or waiting > owed or soon - now >= gap * seconds[best_w]):
            return best_w, now
        return -1, wake

    return choose
