"""Cuts and placements worth a search: even loads, room in memory, recomputing where it is short."""

import itertools
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import attrs

from pfeife.data.machine import Machine, Network
from pfeife.data.optimizers import Optimizer
from pfeife.data.plan import RecomputeOption
from pfeife.lowering.problem import Problem
from pfeife.sched.cutting.cuts import Clusters
from pfeife.sched.cutting.stages import least_of, stage_problem
from pfeife.sched.cutting.workload import Workload
from pfeife.sched.families.orders import folded, looped

_FEW = 4000  # cuts that are looked at one by one where memory is short


@attrs.frozen
class Constraints:
    """What a plan is to keep to: the machine and its links, microbatches, ranks, bytes a rank, the
    optimizer, stages if their number is given, cuts and the stages' ranks likewise, and what the
    account of bytes leaves out of every rank (see `Workload`)."""

    machine: Machine
    microbatches: int
    ranks: int
    memory_limit: float
    network: Network | None = None
    optimizer: Optimizer | None = None
    stages: int | None = None
    cuts: tuple[int, ...] | None = None
    placement: tuple[int, ...] | None = None
    left_out: tuple[int, ...] = ()


@attrs.frozen
class Layout:
    """Cuts and placement, and the problem that they make; `shortage` are the bytes that the worst
    rank lacks for one microbatch (none if it has more than that)."""

    stage_of: tuple[int, ...]
    problem: Problem
    work: Workload
    shortage: float


def starts_stage(stage_of: Sequence[int], unit: int) -> bool:
    """Whether a stage starts with a cluster that is not the first."""
    return stage_of[unit] != stage_of[unit - 1]


def layouts_for(work: Workload, clusters: Clusters, constraints: Constraints) -> list[Layout]:
    """Layouts worth a search; where none has room for a microbatch, also the roomiest ones.

    Raises ValueError if there are fewer clusters than stages.
    """
    found: dict[tuple, Layout] = {}
    for placement in _placements(len(clusters.seconds), constraints):
        for cut in _cuts(work, clusters, constraints, placement):
            if (cut, placement) not in found:
                found[cut, placement] = layout_of(work, constraints, cut, placement)
    if not found:
        count = constraints.stages or constraints.ranks
        raise ValueError(
            f"{count} stages on {constraints.ranks} ranks, but the program has only "
            f"{len(clusters.seconds)} clusters to cut between"
        )
    if all(layout.shortage > 0 for layout in found.values()):
        for placement in _placements(len(clusters.seconds), constraints):
            for cut in _roomiest(work, clusters, constraints, placement):
                found[cut, placement] = layout_of(work, constraints, cut, placement)
    return list(found.values())


def layout_of(
    work: Workload, constraints: Constraints, cut: tuple[int, ...], placement: tuple[int, ...]
) -> Layout:
    problem = stage_problem(
        work,
        cut,
        placement,
        constraints.microbatches,
        machine=constraints.machine,
        network=constraints.network,
        memory_limit=constraints.memory_limit,
    )
    return Layout(cut, problem, work, shortage(work, constraints, cut, placement))


def shortage(
    work: Workload, constraints: Constraints, cut: tuple[int, ...], placement: tuple[int, ...]
) -> float:
    """Bytes that the worst rank lacks for one microbatch; negative if it has more."""
    most = max(least_of(work, cut, placement, constraints.microbatches))
    return most - constraints.memory_limit


def _placements(units: int, constraints: Constraints) -> Iterator[tuple[int, ...]]:
    if constraints.placement:
        yield constraints.placement
        return
    if constraints.cuts:
        counts = [constraints.cuts[-1] + 1]
    else:
        counts = (
            [constraints.stages]
            if constraints.stages
            else [v * constraints.ranks for v in (1, 2, 3)]
        )
    for stages in counts:
        if constraints.ranks <= stages <= units:
            yield from dict.fromkeys(
                (looped(stages, constraints.ranks), folded(stages, constraints.ranks))
            )


def _cuts(
    work: Workload, clusters: Clusters, constraints: Constraints, placement: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Cuts whose ranks are loaded evenly, from those whose stages are."""
    if constraints.cuts:
        yield constraints.cuts
        return
    loads = Loads(clusters, placement, constraints.machine)
    start = loads.even()
    if start is not None:
        yield stages_from(start, len(clusters.seconds))
        yield stages_from(loads.improved(start), len(clusters.seconds))
    units, stages = len(clusters.seconds), len(placement)
    stage_of = [unit * stages // units for unit in range(units)]
    by_count = [unit for unit in range(1, units) if starts_stage(stage_of, unit)]
    if loads.allowed(by_count):
        yield stages_from(by_count, units)


def stages_from(starts: Sequence[int], units: int) -> tuple[int, ...]:
    first = set(starts)
    return tuple(accumulate(int(unit in first) for unit in range(units)))


class Loads:
    """Seconds of every rank for cuts, given by the cluster at which each stage but the first
    starts."""

    def __init__(self, clusters: Clusters, placement: tuple[int, ...], machine: Machine):
        self.clusters, self.placement = clusters, placement
        self.units = len(clusters.seconds)
        self.before = [0.0, *accumulate(clusters.seconds)]
        self.transfers = [
            machine.transfer_seconds(size) if size else 0.0 for size in clusters.crossing
        ]

    def cost(self, starts: Sequence[int]) -> tuple[float, float]:
        """The busiest rank's seconds, then what is sent and the sum of squares."""
        edges = [0, *starts, self.units]
        load = [0.0] * (1 + max(self.placement))
        for stage, (first, end) in enumerate(pairwise(edges)):
            load[self.placement[stage]] += self.before[end] - self.before[first]
        sent = sum(self.transfers[start] for start in starts)
        return max(load), sent + math.sqrt(sum(value**2 for value in load))

    def even(self) -> list[int] | None:
        """Stages of about the same seconds, at borders that are open; None without enough."""
        allowed = [b for b in range(1, self.units) if b not in self.clusters.blocked]
        stages = len(self.placement)
        if len(allowed) < stages - 1:
            return None
        starts: list[int] = []
        for stage in range(1, stages):
            goal = self.before[-1] * stage / stages
            free = allowed[len(starts) : len(allowed) - (stages - 1 - stage)]
            free = [b for b in free if not starts or b > starts[-1]]
            starts.append(min(free, key=lambda b: abs(self.before[b] - goal)))
        return starts

    def improved(self, starts: Sequence[int]) -> list[int]:
        """Borders moved one by one, and by pairs of neighbours, as long as that helps."""
        # A rank may have several stages. Two borders that move together move a whole stage, which
        # changes what is sent and not how much a stage has; long steps pass over a heavy cluster.
        best, cost = list(starts), self.cost(starts)
        moved = True
        while moved:
            moved = False
            for at, step in itertools.product(range(len(best)), (-1, 1, -3, 3, -9, 9)):
                for together in (1, 2):
                    tried = list(best)
                    for index in range(at, min(at + together, len(best))):
                        tried[index] += step
                    if self.allowed(tried) and self.cost(tried) < cost:
                        best, cost, moved = tried, self.cost(tried), True
        return best

    def allowed(self, starts: Sequence[int]) -> bool:
        edges = [0, *starts, self.units]
        open_ = not any(start in self.clusters.blocked for start in starts)
        return open_ and all(low < high for low, high in pairwise(edges))


def _roomiest(
    work: Workload, clusters: Clusters, constraints: Constraints, placement: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Cuts for a placement that need the least memory for one microbatch."""
    if constraints.cuts:
        return
    units, stages = len(clusters.seconds), len(placement)
    allowed = [b for b in range(1, units) if b not in clusters.blocked]
    if math.comb(len(allowed), stages - 1) <= _FEW:
        chosen = itertools.combinations(allowed, stages - 1)
        every = (stages_from(starts, units) for starts in chosen)
        yield min(every, key=lambda cut: shortage(work, constraints, cut, placement), default=())
        return
    loads = Loads(clusters, placement, constraints.machine)
    starts = loads.even()
    if starts is None:
        return
    lacking = shortage(work, constraints, stages_from(starts, units), placement)
    moved = True
    while moved and lacking > 0:
        moved = False
        for at, step in itertools.product(range(len(starts)), (-1, 1, -4, 4)):
            tried = [s + step if i == at else s for i, s in enumerate(starts)]
            if loads.allowed(tried):
                less = shortage(work, constraints, stages_from(tried, units), placement)
                if less < lacking:
                    starts, lacking, moved = tried, less, True
    yield stages_from(starts, units)


def short_of_memory(layout: Layout, constraints: Constraints) -> bool:
    """Whether a rank cannot hold as many microbatches as there are ranks."""
    return any(_needed(layout, rank, 1.0, constraints) > 0 for rank in range(constraints.ranks))


def _needed(layout: Layout, rank: int, share: float, constraints: Constraints) -> float:
    """Bytes that a rank lacks to have a share of as many microbatches in flight as there are
    ranks, and one in any case."""
    limits = layout.problem.memory or ()
    return _wanted(share, constraints) * layout.problem.smallest_memory(rank) - limits[rank]


def _wanted(share: float, constraints: Constraints) -> int:
    """Microbatches that want to be in flight."""
    return max(1, round(share * min(constraints.ranks, constraints.microbatches)))


def lighter(
    layouts: Sequence[Layout],
    constraints: Constraints,
    options: Sequence[Sequence[RecomputeOption]],
) -> list[Layout]:
    """The layouts with as little recomputed on every rank as makes room for all, half or one of
    the microbatches that want to be in flight."""
    found = []
    for layout, share in itertools.product(layouts, (1.0, 0.5, 0.0)):
        chosen: dict[int, RecomputeOption] = {}
        for rank in range(constraints.ranks):
            lacking = _needed(layout, rank, share, constraints) / _wanted(share, constraints)
            units = [
                unit
                for unit, stage in enumerate(layout.stage_of)
                if layout.problem.stage_ranks[stage] == rank
            ]
            chosen |= _relief(units, options, lacking)
        if chosen:
            relieved = {u: options[u][0].saved - option.saved for u, option in chosen.items()}
            work = attrs.evolve(layout.work, recompute=chosen, relieved=relieved)
            placement = layout.problem.stage_ranks
            found.append(layout_of(work, constraints, layout.stage_of, placement))
    return found


def _relief(
    units: Sequence[int], options: Sequence[Sequence[RecomputeOption]], lacking: float
) -> dict[int, RecomputeOption]:
    """Options of clusters that save the bytes that are lacking, the cheapest by the byte first."""
    at = dict.fromkeys(units, 0)

    def price(unit: int) -> float:
        now, then = options[unit][at[unit]], options[unit][at[unit] + 1]
        return (then.extra_seconds - now.extra_seconds) / (now.saved - then.saved)

    while lacking > 0:
        open_ = [unit for unit in units if at[unit] + 1 < len(options[unit])]
        if not open_:
            break
        unit = min(open_, key=price)
        lacking -= options[unit][at[unit]].saved - options[unit][at[unit] + 1].saved
        at[unit] += 1
    return {unit: options[unit][index] for unit, index in at.items() if index}
