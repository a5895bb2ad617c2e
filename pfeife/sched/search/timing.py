"""Orders with heads and tails that follow every move.

    start of the step                                   end of the step
    |------------ head ------------|## X ##|----------- tail -----------|
                                   start   end

The longest path through X is the sum of the three, and the longest of all paths is the makespan.
X starts when the one before it on its rank has ended and what it reads from other ranks is there;
seen from the end, the same holds of the one behind it and of what reads it there:

    end[X]  = seconds[X] + max(end[before[X]],  ready[X])     ready: of all sources, end + lag
    tail[X] = seconds[X] + max(tail[behind[X]], after[X])     after: of all readers, tail + lag

Where transfers may have to wait for one another (`JobShop.contended`), a lag has the wait in it.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from random import Random

import attrs

from pfeife.sched.search.job_shop import JobShop, Orders, starts_of

_Links = list[tuple[tuple[int, float], ...]]


@attrs.frozen(eq=False)
class _Way:
    """One direction of time. Towards the end of the step `near` is before, `far` is behind and
    `links` are sources; from the end on it is the other way round. With one link or none each,
    `link`, `lag` and `other` (that of the opposite direction) have them flat."""

    sign: int
    times: list[float]
    ready: list[float]
    near: list[int]
    far: list[int]
    links: _Links
    link: list[int]
    lag: list[float]
    other: list[int]

    def run(self, order: Iterable[int], seconds: Sequence[float], simple: bool) -> None:
        """Times of operations that come in the direction."""
        times, ready, near = self.times, self.ready, self.near
        if simple:
            link, lag = self.link, self.lag
            for o in order:
                a = times[near[o]]
                b = ready[o] = times[link[o]] + lag[o]
                times[o] = (a if a > b else b) + seconds[o]
            return
        for o in order:
            ready[o] = b = max((times[s] + lag for s, lag in self.links[o]), default=0.0)
            a = times[near[o]]
            times[o] = (a if a > b else b) + seconds[o]

    def follow(
        self, changed: set[int], order: list[int], place: list[int], seconds: Sequence[float]
    ) -> int:
        """Times of what is at the changed places of a topological order in which every link is
        alone, and of what that changes: the work.

        Places count in the direction (from the end on they are negative), so what waits for
        something has a higher one, and is looked at once.
        """
        sign, none, times, ready, near = self.sign, len(place), self.times, self.ready, self.near
        link, lag, far, opposite = self.link, self.lag, self.far, self.other
        heap, work, many = sorted(changed), 0, len(order) // 12
        while heap and work < many:
            o = order[sign * heappop(heap)]
            work += 1
            a = times[near[o]]
            b = ready[o] = times[link[o]] + lag[o]
            a = (a if a > b else b) + seconds[o]
            if a == times[o]:
                continue
            times[o] = a
            for neighbour in (far[o], opposite[o]):
                if neighbour != none and (at := sign * place[neighbour]) not in changed:
                    changed.add(at)
                    heappush(heap, at)
        if heap:
            # Much has changed: the rest in one pass, in which a place costs about an eighth.
            at = sign * heap[0]
            rest = order[at:] if sign > 0 else order[at::-1]
            self.run(rest, seconds, simple=True)
            return 8 * work + len(rest)
        return 8 * work

    def bound_to(self, operation: int, goal: int, window: list[int]) -> tuple[list[int], list[int]]:
        """The part of a window (an operation and what comes next in the direction) that waits for
        the operation once it is on the other side of `goal`, and the rest. Nothing if `goal` itself
        waits for it."""
        waiting, reached, rest = [operation], {operation}, []
        far = self.far[operation]  # no longer waits for the operation itself
        for other in window[1:]:
            near = self.near[other]
            if (near in reached and other != far) or any(
                link in reached for link, _ in self.links[other]
            ):
                if other == goal:
                    return [], []
                waiting.append(other)
                reached.add(other)
            else:
                rest.append(other)
        return waiting, rest


class Timing:
    """Orders, their heads and tails, and the bytes that every operation finds.

    Arrays go by operation; the last entry stands for none. `end` counts from the start of the
    step, `tail` (the operation in it) to its end. `level` is what a rank holds while the operation
    runs. `topological` has all operations so that each comes after what it waits for.
    """

    def __init__(self, shop: JobShop, orders: Orders):
        m, count = shop.microbatches, shop.stages
        self.shop, self.sequences = shop, [list(order) for order in orders]
        size = self.none = 3 * count * m
        tokens = [o // m for o in range(size)]
        self.rank_of = [shop.rank_of[t] for t in tokens]
        present = {o for order in orders for o in order}
        self.seconds = [shop.seconds[t] if o in present else 0.0 for o, t in enumerate(tokens)]
        self.takes = [shop.takes[t] for t in tokens]
        self.change = [shop.takes[t] - shop.frees[t] for t in tokens]
        self.sources, self.readers = _elsewhere(shop, shop.sources), _elsewhere(shop, shop.readers)
        self.then = [_then(shop, o) for o in range(size)]
        self.position = [0] * size
        self.before, self.behind = [size] * (size + 1), [size] * (size + 1)
        self.level = [0.0] * size
        for order in self.sequences:
            self._relink(order, 0, len(order))
        near = _in_time(shop, orders, self.position)
        self.topological = _topological(self.before, self.sources, near)
        self.rank_in = [0] * size  # its place in that order
        for index, operation in enumerate(self.topological):
            self.rank_in[operation] = index
        self.end, self.tail = [0.0] * (size + 1), [0.0] * (size + 1)
        self.ready, self.after = [0.0] * (size + 1), [0.0] * (size + 1)
        self.simple = all(len(s) <= 1 for s in (*self.sources, *self.readers))
        # With one link an operation, as in a chain of stages, flat lists do for all links.
        # The ways hold the lists themselves, which from here on change in place alone.
        self._ways = self._directions()
        # Where transfers may wait: seconds from an operation's end to its reader, with the wait.
        self._waits: dict[tuple[int, int], float] = {}
        self.length = 0.0
        self._time(0, len(self.topological))

    def copy(self) -> Orders:
        """The orders as they are now."""
        return [list(order) for order in self.sequences]

    def _directions(self) -> tuple[_Way, _Way]:
        no_link = ((self.none, 0.0),)
        source, reader = (
            [(operation_links or no_link)[0] for operation_links in links]
            for links in (self.sources, self.readers)
        )
        froms, tos = [s[0] for s in source], [r[0] for r in reader]
        there = _Way(
            *(1, self.end, self.ready, self.before, self.behind, self.sources),
            *(froms, [s[1] for s in source], tos),
        )
        back = _Way(
            *(-1, self.tail, self.after, self.behind, self.before, self.readers),
            *(tos, [r[1] for r in reader], froms),
        )
        return there, back

    def _relink(self, order: list[int], first: int, last: int) -> None:
        """Neighbours, positions and memory of a part of a rank's order."""
        none = self.none
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

    # --- heads and tails ---------------------------------------------------------------------

    def _time(
        self, first: int, last: int, behind_it: Sequence[int] = (), before_it: Sequence[int] = ()
    ) -> int:
        """Heads and tails after a change between two places of the topological order, the work.

        What follows is timed again as far as it changes; all of it if much does. `behind_it` and
        `before_it` are places outside that have other neighbours than before.
        """
        # A move of what stands at first..last changes heads from there on and tails before it:
        #     topological order   . . . . [first ... last] . . . . .
        #     tails  <----------- as far as they change |
        #     heads                | as far as they change ----------->
        # What does not change ends a way early: most moves change few others.
        there, back = self._ways
        order = self.topological
        if self.shop.contended:
            self._with_channels()
            work = 2 * len(order)
        elif self.simple and last - first < len(order) // 12:
            place, seconds = self.rank_in, self.seconds
            ahead = {*range(first, last), *behind_it}
            below = {*range(1 - last, 1 - first), *(-at for at in before_it)}
            work = there.follow(ahead, order, place, seconds)
            work += back.follow(below, order, place, seconds)
        else:
            there.run(order[first:], self.seconds, self.simple)
            back.run(order[last - 1 :: -1] if last else (), self.seconds, self.simple)
            work = len(order) - first + last
        end = self.end
        self.length = max(end[sequence[-1]] for sequence in self.sequences if sequence)
        return work

    def _with_channels(self) -> None:
        """All heads and tails, where a channel carries one transfer at a time.

        What a rank sends over a channel goes in the rank's own order, so heads come in one pass.
        For the tails a wait on a channel stays as long as it is, which a move may change.
        """
        rank_of, seconds, before, behind = self.rank_of, self.seconds, self.before, self.behind
        waits = self._waits
        end, ready, tail, after = self.end, self.ready, self.tail, self.after
        free = [[0.0] * self.shop.ranks for _ in range(self.shop.ranks)]
        ready[:] = [0.0] * len(ready)
        for o in self.topological:
            now = end[o] = max(end[before[o]], ready[o]) + seconds[o]
            channels = free[rank_of[o]]
            for reader, lag in self.readers[o]:
                arrives = channels[rank_of[reader]] = max(now, channels[rank_of[reader]]) + lag
                waits[o, reader] = arrives - now
                ready[reader] = max(ready[reader], arrives)
        for o in reversed(self.topological):
            after[o] = max((tail[r] + waits[o, r] for r, _ in self.readers[o]), default=0.0)
            tail[o] = max(tail[behind[o]], after[o]) + seconds[o]

    def critical(self, random: Random) -> list[int]:
        """The operations of a longest path, from its end to its start."""
        end, ready, before, none = self.end, self.ready, self.before, self.none
        last = [s[-1] for s in self.sequences if s and end[s[-1]] >= self.length]
        operation = last[int(random.random() * len(last))]
        path = [operation]
        while True:
            a, b = end[before[operation]], ready[operation]
            if a > b or (a == b and random.random() < 0.5 and before[operation] != none):
                operation = before[operation]
            else:
                operation = self._awaited(operation)
            if operation == none:
                return path
            path.append(operation)

    def _awaited(self, operation: int) -> int:
        """The operation of another rank whose result comes last."""
        sources, end = self.sources[operation], self.end
        if len(sources) == 1:
            return sources[0][0]
        if self.shop.contended:
            came = {s: end[s] + self._waits[s, operation] for s, _ in sources}
        else:
            came = {s: end[s] + lag for s, lag in sources}
        return max(came, key=lambda s: came[s]) if came else self.none

    # --- moves -------------------------------------------------------------------------------

    def move(self, at: int, to: int, rank: int) -> int:
        """Moves the operation at a place of a rank; 0 if that closes a circle, else the work.

        The topological order is mended between the two places alone (Pearce and Kelly, A Dynamic
        Topological Sort Algorithm, JEA 2006). X goes behind Y, and b waits for X:

            X  a  b  c  Y   ->   a  c  Y | X  b        if Y waited for b, that were a circle
        """
        order, topological, place = self.sequences[rank], self.topological, self.rank_in
        operation, (there, back) = order[at], self._ways
        if to > at:
            first, last = place[operation], place[order[to]]
            window = topological[first : last + 1]
            moving, rest = there.bound_to(operation, order[to], window)
            window = [*rest, *moving]
        else:
            first, last = place[order[to]], place[operation]
            window = topological[first : last + 1][::-1]
            moving, rest = back.bound_to(operation, order[to], window)
            window = [*reversed(moving), *reversed(rest)]
        if not moving:
            return 0
        topological[first : last + 1] = window
        for index, moved in enumerate(window, first):
            place[moved] = index
        order.insert(to, order.pop(at))
        low, high = min(at, to), max(at, to)
        self._relink(order, low, high + 1)
        # The neighbours of what moved have others before or behind them now.
        after, before = self.behind[order[high]], self.before[order[low]]
        return self._time(
            first,
            last + 1,
            () if after == self.none else (place[after],),
            () if before == self.none else (place[before],),
        )


def _elsewhere(shop: JobShop, links: Sequence[Sequence[tuple[int, float]]]) -> _Links:
    """The links of every operation with those of other ranks, by the links of tokens; none of the
    last entry."""
    m, rank_of = shop.microbatches, shop.rank_of
    crossing = [
        [(other, lag) for other, lag in token_links if rank_of[other] != rank_of[token]]
        for token, token_links in enumerate(links)
    ]
    numbered = [
        tuple((other * m + k, lag) for other, lag in token_links)
        for token_links in crossing
        for k in range(m)
    ]
    return [*numbered, ()]


def _then(shop: JobShop, operation: int) -> tuple[int, ...]:
    """What comes after an operation on its own rank in any case (the direct ones)."""
    m, count, rank_of = shop.microbatches, shop.stages, shop.rank_of
    token, k = divmod(operation, m)
    followers = [t * m + k for t, _ in shop.readers[token] if rank_of[t] == rank_of[token]]
    followers += [operation + 1] if k + 1 < m else []
    followers += [operation + count * m] if token < 2 * count else []
    return tuple(followers)


def _in_time(shop: JobShop, orders: Orders, position: Sequence[int]) -> list[int]:
    """All operations by the time at which they start."""
    starts = starts_of(shop, orders)
    assert starts is not None
    # Operations of no seconds start together: those of one rank in their order. An operation of
    # another rank may wait for one of no seconds only over a transfer or a later stage.
    present = sorted(o for order in orders for o in order)
    return sorted(present, key=lambda o: (starts[o], position[o]))


def _topological(before: Sequence[int], sources: _Links, candidates: Sequence[int]) -> list[int]:
    """Operations so that each comes after what it waits for, near the given order."""
    none = len(before) - 1
    done = bytearray(none + 1)
    done[none] = 1
    result: list[int] = []
    for root in candidates:
        stack = [root]
        while stack:
            operation = stack[-1]
            waits = (before[operation], *(s for s, _ in sources[operation]))
            missing = [o for o in waits if not done[o]]
            stack += missing
            if not missing and not done[stack.pop()]:
                done[operation] = 1
                result.append(operation)
    return result
