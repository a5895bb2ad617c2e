"""List scheduling: every rank, whenever it is free, picks what to do next by a rule.

No rule ever deadlocks on memory: a rank starts the forward of a younger microbatch only if the
oldest one that has forwards left still gets through all its stages on that rank.
"""

import math
from heapq import heappop, heappush

from pfeife.sched.rules import Rule
from pfeife.sched.shop import Orders, Shop

_NEVER = math.inf


def list_schedule(shop: Shop, rule: Rule) -> tuple[float, Orders] | None:
    """Seconds and orders that a rule gives; None if one microbatch alone is too big somewhere."""
    m, count = shop.microbatches, shop.stages
    seconds, takes, frees, readers = shop.seconds, shop.takes, shop.frees, shop.readers
    home = shop.home
    memory = rule.memory or shop.memory
    gap, hold, owed, period = rule.gap, rule.hold, rule.owed, rule.period
    slots, ahead = rule.slots, rule.ahead
    mine = [tuple(s for s in range(count) if home[s] == r) for r in range(shop.ranks)]
    alone = [sum(takes[s] for s in stages) for stages in mine]
    if any(need > limit for need, limit in zip(alone, memory, strict=True)):
        return None
    # When the k-th of a token may start; never, as long as something that it reads is missing.
    ready = [[_NEVER if shop.sources[t] else 0.0] * m for t in range(2 * count)]
    missing = [[len(shop.sources[t])] * m for t in range(2 * count)]
    latest = [[0.0] * m for t in range(2 * count)]
    done = [0] * (3 * count)
    held = [0.0] * shop.ranks
    clock = [0.0] * shop.ranks
    orders: Orders = [[] for _ in range(shop.ranks)]
    wake = [0.0] * shop.ranks
    heap = [(0.0, r) for r in range(shop.ranks) if mine[r]]
    whole = shop.whole
    while heap:
        now, rank = heappop(heap)
        if now != wake[rank]:
            continue
        # What is there, and when more will be.
        best_b = best_f = -1
        key_b = key_f = soon_b = soon_f = _NEVER
        pending_w, key_w, waiting_w = -1, _NEVER, 0
        stuck = False
        stages = mine[rank]
        first, oldest = stages[0], done[stages[-1]]
        used, limit = held[rank], memory[rank]
        young = -1.0
        for s in stages:
            k = done[s]
            if k < m:
                at = ready[s][k]
                if at <= now:
                    fits = used + takes[s] <= limit
                    if fits and k > oldest:
                        if young < 0:
                            young = alone[rank]
                            for o in stages:
                                if done[o] > oldest + 1:
                                    young += takes[o] * (done[o] - oldest - 1)
                        fits = young + takes[s] <= limit
                    if s == first and k - done[s + count] >= rule.caps[rank]:
                        pass
                    elif fits:
                        key = k + ahead[s]
                        if key < key_f:
                            key_f, best_f = key, s
                    else:
                        stuck = True
                elif at < soon_f:
                    soon_f = at
            i = s + count
            k = done[i]
            if k < done[s]:
                at = ready[i][k]
                if at <= now:
                    key = k + ahead[i]
                    if key < key_b:
                        key_b, best_b = key, i
                elif at < soon_b:
                    soon_b = at
                w = i + count
                if done[w] < k and not whole[s]:
                    waiting_w += k - done[w]
                    key = done[w] + ahead[w]
                    if key < key_w:
                        key_w, pending_w = key, w
            elif done[i + count] < k and not whole[s]:
                w = i + count
                waiting_w += k - done[w]
                key = done[w] + ahead[w]
                if key < key_w:
                    key_w, pending_w = key, w
        # Choose.
        chosen = -1
        if best_b >= 0:
            chosen = best_b
            if best_f >= 0 and slots is not None:
                by_f = slots[best_f] + done[best_f] * period
                if by_f < slots[best_b] + done[best_b] * period:
                    chosen = best_f
        elif best_f >= 0 and waiting_w <= owed and soon_b - now >= hold * seconds[best_f]:
            chosen = best_f
        if chosen < 0 and pending_w >= 0:
            soon = soon_b if soon_b < soon_f or stuck else soon_f
            if stuck or waiting_w > owed or soon - now >= gap * seconds[pending_w]:
                chosen = pending_w
        if chosen < 0:
            soon = soon_b if soon_b < soon_f else soon_f
            wake[rank] = soon
            if soon < _NEVER:
                heappush(heap, (soon, rank))
            continue
        k = done[chosen]
        done[chosen] = k + 1
        orders[rank].append(chosen * m + k)
        end = now + seconds[chosen]
        held[rank] += takes[chosen] - frees[chosen]
        clock[rank] = wake[rank] = end
        heappush(heap, (end, rank))
        for reader, lag in readers[chosen]:
            arrives = end + lag
            if arrives > latest[reader][k]:
                latest[reader][k] = arrives
            missing[reader][k] -= 1
            if not missing[reader][k]:
                ready[reader][k] = arrives = latest[reader][k]
                other = home[reader]
                if arrives < wake[other] and other != rank:
                    free = clock[other]
                    arrives = arrives if arrives > free else free
                    if arrives < wake[other]:
                        wake[other] = arrives
                        heappush(heap, (arrives, other))
    if sum(map(len, orders)) < shop.operations:
        return None
    return max(clock), orders
