"""The best stages of a chain: the slowest as fast as can be, within the memory."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from reprlib import repr as short

import attrs
import numpy as np

from pfeife.data.machine import Machine
from pfeife.data.network import Network
from pfeife.data.units import size
from pfeife.sched.cutting.account import Account, growing, posted, with_left_out
from pfeife.sched.cutting.border_links import Border, borders_of
from pfeife.sched.cutting.borders import (
    climbed,
    evenest,
    least,
    moves_of,
    open_borders,
    stages_from,
    worst_of,
)
from pfeife.sched.cutting.clusters import Clusters, StageTimes, clusters_of
from pfeife.sched.cutting.constraints import Constraints
from pfeife.sched.cutting.memory_limit import OutOfMemory, TooManyStages
from pfeife.sched.cutting.workload import Workload

_HALVINGS = 6  # of the room that a stage has on a rank with several
_FEW = 4000  # cuts that are looked at one by one where memory is short


@attrs.frozen(slots=False)
class Cutter:
    """Contiguous cuts for stages on given ranks, by dynamic programming over (stages so far,
    clusters so far).

    A stage's seconds are its computation on its rank and what the transfers over its borders take
    of its time (see `Machine.overlap`), or the transfer over its first border if that is longer,
    each over the link of the two ranks (of the `machine`s without a `network`). Its bytes
    are what it has all the time and what `in_flight[stage]` microbatches save (see `account`), with
    what is left out of that on every rank; of the bytes of a rank that the `constraints` allow no
    stage has much more than its share.
    """

    account: Account
    constraints: Constraints
    stage_ranks: Sequence[int]
    in_flight: Sequence[int]

    @property
    def limit(self) -> float:
        """Bytes that every rank may have."""
        return self.constraints.memory_limit

    @cached_property
    def clusters(self) -> Clusters:
        """Seconds of clusters, and what crosses their borders."""
        return clusters_of(self.account.work)

    @cached_property
    def edges(self) -> list[int]:
        """Where a stage may start or end: 0, the open borders, the number of clusters."""
        work = self.account.work
        return [0, *open_borders(work.units, work.blocked), work.units]

    @cached_property
    def times(self) -> StageTimes:
        """Seconds of every stage between any two edges."""
        return StageTimes(self.account.work, self.edges, self.stage_ranks, self.borders)

    @cached_property
    def borders(self) -> tuple[Border | None, ...]:
        """By stage the link with the stage before it."""
        return borders_of(self.stage_ranks, self.constraints.machines, self.constraints.network)

    @cached_property
    def _limited_shares(self) -> list[np.ndarray]:
        return self.shares(self.limit)

    def shares(self, most: float) -> list[np.ndarray]:
        """Bytes of every stage between any two edges, with its part of what all stages of its rank
        need together; endless where that is surely more than `most`."""
        counts, left = Counter(self.stage_ranks), dict(enumerate(self.constraints.left_out))
        each = {rank: left.get(rank, 0) / count for rank, count in counts.items()}
        state, saved, together = _spans(
            self.account.work, self.edges, self.constraints.microbatches, most - min(each.values())
        )
        return [
            state + self.in_flight[stage] * saved + together / counts[rank] + each[rank]
            for stage, rank in enumerate(self.stage_ranks)
        ]

    def worst(self, starts: Sequence[int]) -> int:
        """What the worst rank needs, of the clusters at which stages start."""
        stage_of = stages_from(starts, self.account.work.units)
        needed = self.account.needed(
            stage_of, self.stage_ranks, self.constraints.microbatches, self.in_flight
        )
        return max(with_left_out(needed, self.constraints.left_out))

    def even(self) -> tuple[int, ...]:
        """The stage of every cluster, such that the slowest stage is as fast as can be, and among
        such cuts the most even (see `evenest`). Raises ValueError if there are more stages than
        clusters or open borders, OutOfMemory if none of the cuts fits (with several stages a rank:
        none that was found)."""
        stages, units = len(self.stage_ranks), self.account.work.units
        self._check()
        if math.isinf(self.limit):
            return stages_from(evenest(self.edges, stages, self.times.of) or (), units)

        def fastest(room: float) -> list[int] | None:
            return evenest(self.edges, stages, lambda stage: self._within(stage, room))

        starts = _roomy(fastest, self.worst, self.limit)
        if starts is None:
            # None was found. The roomiest one shows if any fits, and what it lacks where none does;
            # it starts where the fullest stage is as small as can be.
            every = self.shares(math.inf)
            _, start = worst_of(self.edges, stages, every.__getitem__) or (math.inf, [])
            starts = self.roomiest(start)
            if self.lacking(starts) > 0:
                raise _refusal(self.clusters, stages, self.limit, self.lacking(starts))
        return stages_from(starts, units)

    def quiet(self, slack: float) -> tuple[int, ...] | None:
        """The cut whose messages take least, each over its own link, among those whose slowest
        stage takes at most so much (a fraction) longer than that of `even`; None where none was
        found that fits."""
        stages = len(self.stage_ranks)

        def quietest(room: float) -> list[int] | None:
            slowest = worst_of(self.edges, stages, lambda stage: self._within(stage, room))
            if slowest is None:
                return None
            most = slowest[0] * (1 + slack)

            def messages(stage: int) -> np.ndarray:
                seconds = self._within(stage, room)
                # Between cuts with the same messages the more even one.
                return self.times.messages(stage)[:, None] + np.where(
                    seconds <= most, 1e-3 * seconds**2 / max(most, 1e-30), np.inf
                )

            return least(self.edges, stages, messages)

        starts = _roomy(quietest, self.worst, self.limit)
        return None if starts is None else stages_from(starts, self.account.work.units)

    def roomiest(self, starts: Sequence[int]) -> list[int]:
        """Where stages start in a cut whose worst rank needs the least bytes, or no more than the
        limit: the best of all where there are few, else borders moved from where they are."""
        allowed = self.edges[1:-1]
        if math.comb(len(allowed), len(starts)) <= _FEW:
            return min(map(list, itertools.combinations(allowed, len(starts))), key=self.worst)

        def cost(starts: Sequence[int]) -> float:
            # All that fit are equally good, so that it stops at the first.
            return max(self.worst(starts), self.limit)

        moves = moves_of(len(starts), (-1, 1, -4, 4))
        return climbed(starts, cost(starts), cost, self.edges, moves)

    def lacking(self, starts: Sequence[int]) -> float:
        """Bytes that the worst rank lacks, of the clusters at which stages start; not positive
        where they fit."""
        return -math.inf if math.isinf(self.limit) else self.worst(starts) - self.limit

    def _within(self, stage: int, room: float) -> np.ndarray:
        """The seconds of a stage, endless where it has more than so many bytes."""
        seconds = self.times.of(stage)
        if math.isinf(room):
            return seconds
        return np.where(self._limited_shares[stage] <= room, seconds, np.inf)

    def _check(self) -> None:
        stages, units = len(self.stage_ranks), self.account.work.units
        if stages > units:
            raise TooManyStages(
                f"{stages} stages, but the program has only {units} clusters to cut between"
            )
        if stages > len(self.edges) - 1:
            raise ValueError(f"no cut into {stages} stages: {_closed(self.clusters)}")


def balanced(
    account: Account,
    stage_ranks: Sequence[int],
    *,
    machine: Machine,
    in_flight: Sequence[int],
    microbatches: int,
    network: Network | None = None,
    memory_limit: float | None = None,
    left_out: Sequence[int] = (),
) -> tuple[int, ...]:
    """`Cutter.even` within a machine's memory, unless another limit is given."""
    limit = machine.memory if memory_limit is None else memory_limit
    ranks, more = 1 + max(stage_ranks), tuple(left_out)
    constraints = Constraints(machine, microbatches, ranks, limit, network, left_out=more)
    return Cutter(account, constraints, stage_ranks, in_flight).even()


def _spans(
    work: Workload, edges: Sequence[int], microbatches: int, most: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of a stage between two edges: its state, endless where that is more than `most`; what
    it saves of a microbatch; and what its rank needs once for all its stages."""
    # Row i grows from edge i on, one cluster at a time, so that all spans take one pass each.
    state, saved, together = (np.full((len(edges),) * 2, fill) for fill in (np.inf, 0.0, 0.0))
    place = {edge: index for index, edge in enumerate(edges)}
    for i, first in enumerate(edges[:-1]):
        for end, footprint in enumerate(growing(work, range(first, work.units)), first + 1):
            if footprint.state > most:  # it only grows
                break
            if end in place:
                j = place[end]
                state[i, j], saved[i, j] = (
                    footprint.state,
                    max(footprint.saved, footprint.for_weights),
                )
                together[i, j] = footprint.temporaries + posted(footprint, 1, microbatches)
    return state, saved, together


def _roomy(
    fastest: Callable[[float], list[int] | None],
    worst: Callable[[Sequence[int]], float],
    limit: float,
) -> list[int] | None:
    """The fastest cut that fits, by what a stage may have: a rank with one stage gives it all, and
    of several one may have more than its share, which is looked for by halving."""
    # With one stage a rank the first try is all. With several the shares of a rank's stages need
    # not be even: less for each stage forces cuts whose sums fit.
    low, high, chosen = 0.0, float(limit), None
    tried = fastest(high)
    if tried is None or worst(tried) <= limit:
        return tried
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        tried = fastest(middle)
        if tried is not None and worst(tried) > limit:
            high = middle
        else:
            low, chosen = middle, tried or chosen
    return chosen


def _closed(clusters: Clusters) -> str:
    closed = sorted(clusters.blocked)
    return (
        f"borders {short(closed)} are closed, where a cut would part what updates and reads one "
        "buffer, or is not where cut_at says"
    )


def _refusal(clusters: Clusters, stages: int, limit: float, lacks: float) -> OutOfMemory:
    text = (
        f"no cut into {stages} stages fits {size(limit)} a rank: with the roomiest one the worst "
        f"rank lacks {size(lacks)}; use more stages, smaller microbatches or a larger limit"
    )
    return OutOfMemory(f"{text}; {_closed(clusters)}" if clusters.blocked else text, lacks)
