"""Simulated annealing of a schedule's orders, by moves of operations on a longest path.

A proposal is judged by the longest path through the operations that it moves, as job-shop searches
do (Taillard, Parallel taboo search techniques for the job shop, ORSA J. Comp. 1994; Balas and
Vazacopoulos, Guided local search with shifting bottleneck, Man. Sci. 1998): heads before and tails
after them stay, so it costs a few operations, not a whole evaluation. Only what is accepted is
timed again, from the moved operations on.
"""

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from random import Random

import attrs

from pfeife.sched.search.shop import Orders, Shop, starts_of


@attrs.frozen
class Annealed:
    """The best orders seen, their seconds (no contention of transfers), the operations looked at
    (the unit of the budget) and the evaluations."""

    seconds: float
    orders: Orders
    work: int
    evaluations: int


def anneal(
    shop: Shop,
    orders: Orders,
    *,
    work: int,
    random: Random,
    bound: float = 0.0,
    hot: float = 0.25,
    cold: float = 0.005,
    reach: int = 12,
    over: Callable[[], bool] = lambda: False,
) -> Annealed:
    """Improves orders until `work` operations were looked at, `bound` is reached, or it is `over`.

    The temperature falls from `hot` to `cold` times the mean seconds of an operation. Moves go at
    most `reach` places. The same random state gives the same result unless `over` cuts it short.
    """
    state = _State(shop, orders)
    best, kept = state.length, state.copy()
    goal = bound * (1 + 1e-9)
    mean = sum(state.seconds) / max(1, shop.operations)
    spent = evaluations = tries = 0
    path = state.critical(random)
    uniform = random.random
    falling = math.log(cold / hot)
    temperature = hot * mean
    while spent < work and best > goal:
        tries += 1
        if tries % 64 == 0:
            if over():
                break
            temperature = hot * mean * math.exp(falling * spent / work)
        operation = path[int(uniform() * len(path))]
        distance = 1 + int(uniform() * uniform() * reach)
        move = state.propose(operation, distance if uniform() < 0.5 else -distance)
        spent += 12
        if move is None:
            continue
        seconds, at, to = move
        if seconds > state.length - temperature * math.log(1 - uniform()):
            continue
        passed = state.apply(at, to, state.home[operation])
        if not passed:
            continue
        spent += passed + len(path)
        evaluations += 1
        path = state.critical(random)
        if state.length < best * (1 - 1e-12):
            best, kept = state.length, state.copy()
    return Annealed(best, kept, spent, evaluations)


class _State:
    """Orders with heads and tails that follow every move.

    Arrays go by operation; the last entry stands for none. `end` counts from the begin of the
    step, `tail` (the operation in it) to its end; `ready` is when all from other ranks is there,
    `after` the tail of what waits on other ranks.
    """

    def __init__(self, shop: Shop, orders: Orders):
        m, count = shop.microbatches, shop.stages
        self.shop, self.sequences = shop, [list(order) for order in orders]
        size = 3 * count * m
        tokens = [o // m for o in range(size)]
        self.home = [shop.home[t] for t in tokens]
        present = {o for order in orders for o in order}
        self.seconds = [shop.seconds[t] if o in present else 0.0 for o, t in enumerate(tokens)]
        self.takes = [shop.takes[t] for t in tokens]
        self.change = [shop.takes[t] - shop.frees[t] for t in tokens]
        self.sources = [self._elsewhere(o, shop.sources) for o in range(size)] + [()]
        self.readers = [self._elsewhere(o, shop.readers) for o in range(size)] + [()]
        self.then = [self._then(o) for o in range(size)]
        self.position = [0] * size
        self.before, self.behind = [size] * (size + 1), [size] * (size + 1)
        self.level = [0.0] * size
        for order in self.sequences:
            self._relink(order, 0, len(order))
        starts = starts_of(shop, orders)
        assert starts is not None
        place = self.position
        # Operations of no seconds begin together: those of one rank in their order. An operation
        # of another rank may wait for one of no seconds only over a transfer or a later stage.
        self.topological = _topological(self, sorted(present, key=lambda o: (starts[o], place[o])))
        self.rank_in = [0] * size
        for index, operation in enumerate(self.topological):
            self.rank_in[operation] = index
        self.end, self.tail = [0.0] * (size + 1), [0.0] * (size + 1)
        self.ready, self.after = [0.0] * (size + 1), [0.0] * (size + 1)
        self.simple = all(len(s) <= 1 for s in (*self.sources, *self.readers))
        one = ((size, 0.0),)
        self.source = [(s or one)[0][0] for s in self.sources]
        self.source_lag = [(s or one)[0][1] for s in self.sources]
        self.reader = [(s or one)[0][0] for s in self.readers]
        self.reader_lag = [(s or one)[0][1] for s in self.readers]
        self.length = 0.0
        self._time(0, len(self.topological))

    def copy(self) -> Orders:
        return [list(order) for order in self.sequences]

    def _elsewhere(self, operation: int, links) -> tuple[tuple[int, float], ...]:
        token, k = divmod(operation, self.shop.microbatches)
        m, home = self.shop.microbatches, self.shop.home
        return tuple((t * m + k, lag) for t, lag in links[token] if home[t] != home[token])

    def _then(self, operation: int) -> tuple[int, ...]:
        """What comes after an operation on its own rank in any case (the direct ones)."""
        m, count, home = self.shop.microbatches, self.shop.stages, self.shop.home
        token, k = divmod(operation, m)
        found = [t * m + k for t, _ in self.shop.readers[token] if home[t] == home[token]]
        found += [operation + 1] if k + 1 < m else []
        found += [operation + count * m] if token < 2 * count else []
        return tuple(found)

    def _relink(self, order: list[int], first: int, last: int) -> None:
        """Neighbours, positions and memory of a part of a rank's order."""
        none = len(self.before) - 1
        before = order[first - 1] if first else none
        held = self.level[before] - self.takes[before] + self.change[before] if first else 0.0
        for index in range(first, last):
            operation = order[index]
            self.position[operation] = index
            self.before[operation] = before
            self.behind[before] = operation
            self.level[operation] = held + self.takes[operation]
            held += self.change[operation]
            before = operation
        after = order[last] if last < len(order) else none
        self.behind[before] = after
        self.before[after] = before
        self.before[none] = self.behind[none] = none

    def _time(
        self, first: int, last: int, behind_it: Sequence[int] = (), before_it: Sequence[int] = ()
    ) -> int:
        """Heads and tails after a change between two places of the topological order, the work.

        What follows is timed again as far as it changes; all of it if much does. `behind_it` and
        `before_it` are places outside that have other neighbours than before.
        """
        order, place = self.topological, self.rank_in
        end, tail, ready, after = self.end, self.tail, self.ready, self.after
        before, behind, seconds = self.before, self.behind, self.seconds
        none, many = len(end) - 1, len(order) // 12
        work = 0
        if self.simple and last - first < many:
            source, source_lag = self.source, self.source_lag
            reader, reader_lag = self.reader, self.reader_lag
            heap = [*range(first, last), *behind_it]
            queued = set(heap)
            while heap and work < many:
                at = heappop(heap)
                o = order[at]
                work += 1
                a = end[before[o]]
                b = ready[o] = end[source[o]] + source_lag[o]
                a = (a if a > b else b) + seconds[o]
                if a != end[o]:
                    end[o] = a
                    for other in (behind[o], reader[o]):
                        if other != none and place[other] not in queued:
                            queued.add(place[other])
                            heappush(heap, place[other])
            if heap:
                self._heads(heap[0])
                work += (len(order) - heap[0]) // 8
            heap = [*range(1 - last, 1 - first), *(-at for at in before_it)]
            queued = set(heap)
            count = 0
            while heap and count < many:
                at = heappop(heap)
                o = order[-at]
                count += 1
                a = tail[behind[o]]
                b = after[o] = tail[reader[o]] + reader_lag[o]
                a = (a if a > b else b) + seconds[o]
                if a != tail[o]:
                    tail[o] = a
                    for other in (before[o], source[o]):
                        if other != none and -place[other] not in queued:
                            queued.add(-place[other])
                            heappush(heap, -place[other])
            if heap:
                self._tails(1 - heap[0])
                work += (1 - heap[0]) // 8
            work = 8 * (work + count)
        else:
            self._heads(first)
            self._tails(last)
            work = len(order) - first + last
        self.length = max(end[sequence[-1]] for sequence in self.sequences if sequence)
        return work

    def _heads(self, first: int) -> None:
        """Heads from place `first` of the topological order on."""
        end, ready, before, seconds = self.end, self.ready, self.before, self.seconds
        if self.simple:
            source, lag = self.source, self.source_lag
            for o in self.topological[first:]:
                a = end[before[o]]
                b = ready[o] = end[source[o]] + lag[o]
                end[o] = (a if a > b else b) + seconds[o]
            return
        for o in self.topological[first:]:
            ready[o] = b = max((end[s] + lag for s, lag in self.sources[o]), default=0.0)
            a = end[before[o]]
            end[o] = (a if a > b else b) + seconds[o]

    def _tails(self, last: int) -> None:
        """Tails before place `last` of the topological order."""
        tail, after, behind, seconds = self.tail, self.after, self.behind, self.seconds
        order = self.topological[last - 1 :: -1] if last else ()
        if self.simple:
            reader, lag = self.reader, self.reader_lag
            for o in order:
                a = tail[behind[o]]
                b = after[o] = tail[reader[o]] + lag[o]
                tail[o] = (a if a > b else b) + seconds[o]
            return
        for o in order:
            after[o] = b = max((tail[r] + lag for r, lag in self.readers[o]), default=0.0)
            a = tail[behind[o]]
            tail[o] = (a if a > b else b) + seconds[o]

    def critical(self, random: Random) -> list[int]:
        """The operations of a longest path, from its end to its begin."""
        end, ready, before = self.end, self.ready, self.before
        last = [s[-1] for s in self.sequences if s and end[s[-1]] >= self.length]
        operation = last[int(random.random() * len(last))]
        path, none = [operation], len(end) - 1
        while True:
            a, b = end[before[operation]], ready[operation]
            if a > b or (a == b and random.random() < 0.5 and before[operation] != none):
                operation = before[operation]
            elif self.simple:
                operation = self.source[operation]
            else:
                found = [s for s, lag in self.sources[operation] if end[s] + lag == b]
                operation = found[0] if found else none
            if operation == none:
                return path
            path.append(operation)

    def propose(self, operation: int, distance: int) -> tuple[float, int, int] | None:
        """The longest path through what a move changes, and the move; None if it may not be."""
        order = self.sequences[self.home[operation]]
        at = self.position[operation]
        to = min(max(at + distance, 0), len(order) - 1)
        level, takes = self.level, self.takes
        memory = self.shop.memory[self.home[operation]]
        change = self.change[operation]
        if to > at:
            # As far as it may go.
            then = self.then[operation]
            others = order[at + 1 : to + 1]
            for index, other in enumerate(others):
                if other in then or (
                    change < 0 and takes[other] and level[other] - change > memory
                ):
                    del others[index:]
                    break
            sequence = [*others, operation]
            to = at + len(others)
            low, high = at, to
        else:
            others = order[to:at]
            for index in range(len(others) - 1, -1, -1):
                other = others[index]
                if operation in self.then[other] or (
                    change > 0
                    and (
                        (takes[other] and level[other] + change > memory)
                        or level[other] - takes[other] + takes[operation] > memory
                    )
                ):
                    del others[: index + 1]
                    break
            sequence = [operation, *others]
            to = at - len(others)
            low, high = to, at
        if to == at:
            return None
        seconds, ready, after = self.seconds, self.ready, self.after
        now = self.end[self.before[order[low]]]
        ends = []
        for other in sequence:
            b = ready[other]
            now = (now if now > b else b) + seconds[other]
            ends.append(now)
        left = self.tail[self.behind[order[high]]]
        longest = 0.0
        for other in reversed(sequence):
            b = after[other]
            left = left if left > b else b
            through = ends.pop() + left
            if through > longest:
                longest = through
            left += seconds[other]
        return longest, at, to

    def apply(self, at: int, to: int, rank: int) -> int:
        """Moves the operation at a place of a rank; 0 if that closes a circle, else the work."""
        order = self.sequences[rank]
        operation = order[at]
        topological, place = self.topological, self.rank_in
        if to > at:
            first, last = place[operation], place[order[to]]
            found, rest = self._reached(operation, order[to], topological[first : last + 1])
            if found is None:
                return 0
            window = [*rest, *found]
        else:
            first, last = place[order[to]], place[operation]
            found, rest = self._reaching(operation, order[to], topological[first : last + 1])
            if found is None:
                return 0
            window = [*reversed(found), *reversed(rest)]
        topological[first : last + 1] = window
        for index, other in enumerate(window, first):
            place[other] = index
        order.insert(to, order.pop(at))
        self._relink(order, min(at, to), max(at, to) + 1)
        # The neighbours of what moved have others before or behind them now.
        after = self.behind[order[max(at, to)]]
        before = self.before[order[min(at, to)]]
        none = len(self.before) - 1
        return self._time(
            first,
            last + 1,
            () if after == none else (place[after],),
            () if before == none else (place[before],),
        )

    def _reached(
        self, operation: int, last: int, window: list[int]
    ) -> tuple[list[int] | None, list[int]]:
        """The part of a window that waits for an operation once it is behind `last`, the rest."""
        found, reached, rest = [operation], {operation}, []
        behind = self.behind[operation]  # no longer waits for the operation itself
        for other in window[1:]:
            before = self.before[other]
            if (before in reached and other != behind) or any(
                source in reached for source, _ in self.sources[other]
            ):
                if other == last:
                    return None, []
                found.append(other)
                reached.add(other)
            else:
                rest.append(other)
        return found, rest

    def _reaching(
        self, operation: int, first: int, window: list[int]
    ) -> tuple[list[int] | None, list[int]]:
        """The part of a window that an operation waits for once it is before `first`, the rest,
        both from the end on."""
        found, reaching, rest = [operation], {operation}, []
        before = self.before[operation]
        for other in reversed(window[:-1]):
            behind = self.behind[other]
            if (behind in reaching and other != before) or any(
                reader in reaching for reader, _ in self.readers[other]
            ):
                if other == first:
                    return None, []
                found.append(other)
                reaching.add(other)
            else:
                rest.append(other)
        return found, rest


def _topological(state: _State, candidates: list[int]) -> list[int]:
    """Operations so that each comes after what it waits for, near the given order."""
    none = len(state.before) - 1
    done = bytearray(none + 1)
    done[none] = 1
    result: list[int] = []
    for root in candidates:
        stack = [root]
        while stack:
            operation = stack[-1]
            missing = [
                o
                for o in (state.before[operation], *(s for s, _ in state.sources[operation]))
                if not done[o]
            ]
            if missing:
                stack += missing
            else:
                stack.pop()
                if not done[operation]:
                    done[operation] = 1
                    result.append(operation)
    return result
