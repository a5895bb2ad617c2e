"""A rank that is free does what a chooser picks: the loop under all list schedulers."""

import math
from collections.abc import Callable
from heapq import heappop, heappush

import attrs

from pfeife.sched.search.job_shop import JobShop, Orders

NEVER = math.inf


class Floor:
    """What a chooser sees, by token or rank.

    `done[token]` operations have started; the next F or I of a token may start at `ready[token][k]`
    (never, as long as something that it reads has not started); `held[rank]` bytes.
    """

    def __init__(self, shop: JobShop):
        m, count = shop.microbatches, shop.stages
        self.shop = shop
        self.stages = [
            tuple(s for s in range(count) if shop.rank_of[s] == r) for r in range(shop.ranks)
        ]
        self.alone = [sum(shop.takes[s] for s in stages) for stages in self.stages]
        self.ready = [[NEVER if shop.sources[t] else 0.0] * m for t in range(2 * count)]
        self.done = [0] * (3 * count)
        self.held = [0.0] * shop.ranks

    def room(self, rank: int, stage: int, memory: float) -> bool:
        """Whether the next F of a stage finds memory, and leaves enough.

        Enough is that the oldest microbatch that has forwards left on this rank still gets through
        all of them, were all younger ones to stay; so nothing ever deadlocks on memory.
        """
        takes, done = self.shop.takes, self.done
        if self.held[rank] + takes[stage] > memory:
            return False
        stages = self.stages[rank]
        oldest = done[stages[-1]]
        if done[stage] == oldest:
            return True
        young = self.alone[rank] + takes[stage]
        for sibling in stages:
            if done[sibling] > oldest + 1:
                young += takes[sibling] * (done[sibling] - oldest - 1)
        return young <= memory


# From a rank and the time to the token that it runs, or -1 and when to ask again at the latest.
Chooser = Callable[[int, float], tuple[int, float]]


@attrs.frozen
class Dispatched:
    """What came of a chooser. `left` operations never started: ranks waited for one another."""

    seconds: float
    orders: Orders
    left: int


def dispatch(floor: Floor, choose: Chooser) -> Dispatched:
    """Seconds and orders that come of a chooser; a channel carries one transfer at a time.

    Ranks are asked in the order of time. One that has nothing to do sleeps until `wake`: when its
    chooser wants to be asked again, or something arrives before that.
    """
    shop = floor.shop
    m, seconds, readers, rank_of = shop.microbatches, shop.seconds, shop.readers, shop.rank_of
    change = [a - b for a, b in zip(shop.takes, shop.frees, strict=True)]
    done, ready, held = floor.done, floor.ready, floor.held
    missing = [[len(shop.sources[t])] * m for t in range(2 * shop.stages)]
    latest = [[0.0] * m for t in range(2 * shop.stages)]
    orders: Orders = [[] for _ in range(shop.ranks)]
    clock, wake = [0.0] * shop.ranks, [0.0] * shop.ranks
    free = [[0.0] * shop.ranks for _ in range(shop.ranks)]
    # Ranks by when they are to be asked; entries that a later one has replaced stay behind.
    heap = [(0.0, rank) for rank in range(shop.ranks) if floor.stages[rank]]
    while heap:
        now, rank = heappop(heap)
        if now != wake[rank]:
            continue  # an entry from before something else woke the rank, or kept it busy
        token, soon = choose(rank, now)
        if token < 0:
            wake[rank] = soon
            if soon < NEVER:
                heappush(heap, (soon, rank))
            continue
        k = done[token]
        done[token] = k + 1
        orders[rank].append(token * m + k)
        end = now + seconds[token]
        # What it takes and what it frees count at once: nobody looks at this rank before it ends.
        held[rank] += change[token]
        clock[rank] = wake[rank] = end
        heappush(heap, (end, rank))
        channels = free[rank]
        for reader, lag in readers[token]:
            arrives, target = end, rank_of[reader]
            if target != rank:
                arrives = (end if end > channels[target] else channels[target]) + lag
                channels[target] = arrives
            if arrives > latest[reader][k]:
                latest[reader][k] = arrives
            missing[reader][k] -= 1
            if missing[reader][k]:
                continue
            arrives = ready[reader][k] = latest[reader][k]
            arrives = arrives if arrives > clock[target] else clock[target]
            if arrives < wake[target]:  # never of the rank itself, which is free at `end`
                wake[target] = arrives
                heappush(heap, (arrives, target))
    return Dispatched(max(clock), orders, shop.operations - sum(map(len, orders)))
