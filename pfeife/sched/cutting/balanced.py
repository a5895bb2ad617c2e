"""The best stages of a chain: the slowest as fast as can be, within the memory."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

import attrs
import numpy as np

from pfeife.data.machine import Machine
from pfeife.sched.cutting.account import Account, held_from, posted, with_left_out
from pfeife.sched.cutting.borders import (
    between,
    climbed,
    evenest,
    open_borders,
    stages_from,
    worst_of,
)
from pfeife.sched.cutting.room import NoRoom
from pfeife.sched.cutting.workload import Workload


@attrs.frozen
class Clusters:
    """A workload per cluster and per border.

    `seconds` are of one microbatch, forward and backward; `crossing[c]` are the bytes of
    activations and gradients that a cut before cluster c sends for each microbatch; `blocked` has
    the borders at which a cut would tear a buffer's updates apart.
    """

    seconds: tuple[float, ...]
    crossing: tuple[int, ...]
    blocked: frozenset[int] = frozenset()

    def allowed(self, starts: Sequence[int]) -> bool:
        """Whether stages may start at these clusters: in their order, at open borders."""
        edges = [0, *starts, len(self.seconds)]
        rising = all(low < high for low, high in itertools.pairwise(edges))
        return rising and self.blocked.isdisjoint(starts)


def clusters_of(work: Workload) -> Clusters:
    """A workload as `balanced` looks at it: per cluster its seconds and bytes, summed over forward
    and backward, and per border the bytes that a cut there would send."""
    seconds = tuple(sum(work.of(kind, unit) for kind in work.seconds) for unit in range(work.units))
    change = [0] * work.units
    for flow in work.flows:
        ends = [flow.unit, *(unit for unit, _ in flow.readers)]
        change[min(ends)] += flow.bytes
        change[max(ends)] -= flow.bytes
    return Clusters(seconds, (0, *accumulate(change[:-1])), work.blocked)


_HALVINGS = 6  # of the room that a stage has on a rank with several
_FEW = 4000  # cuts that are looked at one by one where memory is short


def balanced(
    account: Account,
    stage_ranks: Sequence[int],
    *,
    machine: Machine,
    in_flight: Sequence[int],
    microbatches: int,
    memory_limit: float | None = None,
    left_out: Sequence[int] = (),
) -> tuple[int, ...]:
    """The stage of every cluster, contiguous, such that the slowest stage is as fast as can be.

    Dynamic programming over (stages so far, clusters so far), twice (see `evenest`). A
    stage's seconds are its computation and what the transfers over its borders take of its time
    (see `Machine.overlap`), or the transfer over its first border if that is longer; its bytes are
    what it has all the time and what `in_flight[stage]` microbatches save (see `account`), with
    what is `left_out` of that on every rank; of the `memory_limit` bytes of a rank no stage has
    much more than its share. Raises ValueError if there are more stages than clusters or open
    borders, NoRoom if none of the cuts fits (with several stages a rank: none that was found).
    """
    work, stages = account.work, len(stage_ranks)
    clusters = clusters_of(work)
    if stages > work.units:
        raise ValueError(
            f"{stages} stages, but the program has only {work.units} clusters to cut between"
        )
    edges = [0, *open_borders(work.units, work.blocked), work.units]
    if stages > len(edges) - 1:
        raise ValueError(f"no cut into {stages} stages: {_closed(clusters)}")
    limit = machine.memory if memory_limit is None else memory_limit
    seconds = _stage_seconds(clusters, machine, edges)
    if math.isinf(limit):
        found = evenest(edges, stages, lambda stage: seconds)
        return stages_from(found or (), work.units)
    memory = _Memory(account, edges, stage_ranks, in_flight, microbatches, left_out)
    within = memory.shares(limit)

    def fastest(room: float) -> list[int] | None:
        """The cut with stages of at most so many bytes."""
        return evenest(
            edges, stages, lambda stage: np.where(within[stage] <= room, seconds, np.inf)
        )

    found = _roomy(fastest, memory.worst, limit)
    if found is None:
        every = memory.shares(math.inf)
        _, start = worst_of(edges, stages, every.__getitem__) or (math.inf, [])  # there is one
        found = roomiest(clusters, start, memory.worst, limit)
        if memory.worst(found) > limit:
            raise _refusal(clusters, stages, limit, memory.worst(found) - limit)
    return stages_from(found, work.units)


@attrs.frozen
class _Memory:
    """What contiguous stages need on their ranks."""

    account: Account
    edges: Sequence[int]
    stage_ranks: Sequence[int]
    in_flight: Sequence[int]
    microbatches: int
    left_out: Sequence[int]

    def shares(self, most: float) -> list[np.ndarray]:
        """What every stage needs, with its part of what all stages of its rank need together;
        endless where that is surely more than `most`."""
        counts, left = Counter(self.stage_ranks), dict(enumerate(self.left_out))
        each = {rank: left.get(rank, 0) / count for rank, count in counts.items()}
        state, saved, together = _spans(
            self.account.work, self.edges, self.microbatches, most - min(each.values())
        )
        return [
            state + self.in_flight[stage] * saved + together / counts[rank] + each[rank]
            for stage, rank in enumerate(self.stage_ranks)
        ]

    def worst(self, starts: Sequence[int]) -> int:
        """What the worst rank needs, of the clusters at which stages start."""
        stage_of = stages_from(starts, self.account.work.units)
        needed = self.account.needed(stage_of, self.stage_ranks, self.microbatches, self.in_flight)
        return max(with_left_out(needed, self.left_out))


def _stage_seconds(clusters: Clusters, machine: Machine, edges: Sequence[int]) -> np.ndarray:
    """Seconds of a stage between two edges, endless unless the second comes after the first."""
    inner = range(1, len(clusters.seconds))
    sizes = [clusters.crossing[at] if at in inner else None for at in edges]
    busy = np.array([0.0 if size is None else machine.send_seconds(size) for size in sizes])
    arriving = [0.0 if size is None else machine.transfer_seconds(size) for size in sizes]
    time = np.array([0.0, *accumulate(clusters.seconds)])[edges]
    needed = between(time) + (busy[:, None] + busy)
    return np.maximum(needed, np.array(arriving)[:, None])


def _spans(
    work: Workload, edges: Sequence[int], microbatches: int, most: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of a stage between two edges: its state, endless where that is more than `most`; what
    it saves of a microbatch; and what its rank needs once for all its stages."""
    state, saved, together = (np.full((len(edges),) * 2, fill) for fill in (np.inf, 0.0, 0.0))
    place = {edge: index for index, edge in enumerate(edges)}
    for i, first in enumerate(edges[:-1]):
        for end, found in enumerate(held_from(work, first), first + 1):
            if found.state > most:  # it only grows
                break
            if end in place:
                j = place[end]
                state[i, j], saved[i, j] = found.state, max(found.saved, found.kept)
                together[i, j] = found.temporaries + posted(found, 1, microbatches)
    return state, saved, together


def _roomy(
    fastest: Callable[[float], list[int] | None],
    worst: Callable[[Sequence[int]], float],
    limit: float,
) -> list[int] | None:
    """The fastest cut that fits, by what a stage may have: a rank with one stage gives it all, and
    of several one may have more than its share, which is looked for by halving."""
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


def roomiest(
    clusters: Clusters,
    starts: Sequence[int],
    worst: Callable[[Sequence[int]], float],
    limit: float,
) -> list[int]:
    """Where stages start in a cut whose `worst` rank needs the least bytes, or no more than the
    limit: the best of all where there are few, else borders moved from where they are."""
    allowed = open_borders(len(clusters.seconds), clusters.blocked)
    if math.comb(len(allowed), len(starts)) <= _FEW:
        every = map(list, itertools.combinations(allowed, len(starts)))
        return min(every, key=worst)

    def cost(starts: Sequence[int]) -> float:
        return max(worst(starts), limit)

    return climbed(starts, cost, clusters.allowed, (-1, 1, -4, 4))


def _closed(clusters: Clusters) -> str:
    closed = sorted(clusters.blocked)
    return f"no cut may part what updates and reads one buffer, so borders {closed} are closed"


def _refusal(clusters: Clusters, stages: int, limit: float, lacks: float) -> NoRoom:
    text = (
        f"no cut into {stages} stages fits {limit} bytes a rank: with the roomiest one the worst "
        f"rank lacks {lacks}; use more stages, smaller microbatches or a larger limit"
    )
    return NoRoom(f"{text}; {_closed(clusters)}" if clusters.blocked else text, lacks)
