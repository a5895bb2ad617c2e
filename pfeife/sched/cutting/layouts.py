"""Cuts and placements worth a search: even loads, room in memory, recomputing where it is short."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise

import attrs

from pfeife.data.plan import RecomputeOption
from pfeife.lowering.problem import Problem
from pfeife.sched.cutting.account import NO_RELIEF, Account, Relief, with_left_out
from pfeife.sched.cutting.balanced import Cutter
from pfeife.sched.cutting.border_links import Border
from pfeife.sched.cutting.borders import borders, climbed, moves_of, stages_from
from pfeife.sched.cutting.clusters import clusters_of
from pfeife.sched.cutting.constraints import Constraints
from pfeife.sched.cutting.memory_limit import TooManyStages
from pfeife.sched.cutting.recompute_choice import cheapest_first
from pfeife.sched.cutting.stages import problem_of, room_for
from pfeife.sched.families.orders import folded, looped


@attrs.frozen
class Layout:
    """Cuts and placement, what is recomputed, and the problem that they make; `shortage` are the
    bytes that the worst rank lacks for one microbatch (negative if it has more than that)."""

    stage_of: tuple[int, ...]
    problem: Problem
    relief: Relief
    shortage: float


def layouts_for(account: Account, constraints: Constraints) -> list[Layout]:
    """Layouts worth a search; where none has room for a microbatch, also the roomiest ones.

    Raises TooManyStages if there are fewer clusters than stages.
    """
    units = account.work.units
    cutters = [
        # With one microbatch in flight: more need not fit.
        Cutter(account, constraints, placement, (1,) * len(placement))
        for placement in _placements(units, constraints)
    ]
    pairs = _placed(cutters, even_cuts)
    if not pairs:
        raise TooManyStages(
            f"{constraints.count} stages on {constraints.ranks} ranks, but the program has only "
            f"{units} clusters to cut between"
        )
    layouts = [layout_of(account, constraints, *pair) for pair in pairs]
    # Even loads may put what saves most on one rank: then room comes before speed.
    if all(layout.shortage > 0 for layout in layouts) and not constraints.cuts:
        more = [pair for pair in _placed(cutters, _roomiest) if pair not in pairs]
        layouts += [layout_of(account, constraints, *pair) for pair in more]
    return layouts


def _placed(
    cutters: Iterable[Cutter], cuts_of: Callable[[Cutter], Iterable[tuple[int, ...]]]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The cuts of cutters with the ranks of their stages, each once."""
    pairs = ((cut, tuple(cutter.stage_ranks)) for cutter in cutters for cut in cuts_of(cutter))
    return list(dict.fromkeys(pairs))


def _roomiest(cutter: Cutter) -> Iterator[tuple[int, ...]]:
    """The cut whose worst rank needs the least memory."""
    start = Loads(cutter).even()
    if start is not None:
        yield stages_from(cutter.roomiest(start), cutter.account.work.units)


def layout_of(
    account: Account,
    constraints: Constraints,
    cut: tuple[int, ...],
    placement: tuple[int, ...],
    relief: Relief = NO_RELIEF,
) -> Layout:
    """A cut on a placement: the problem that it makes, and what its worst rank lacks."""
    always = account.always(cut, placement, constraints.microbatches)
    always = with_left_out(always, constraints.left_out)
    problem = attrs.evolve(
        problem_of(account, constraints, cut, placement, relief=relief),
        memory=room_for(constraints.memory_limit, always),
    )
    most = max(needed + problem.smallest_memory(rank) for rank, needed in enumerate(always))
    return Layout(cut, problem, relief, most - constraints.memory_limit)


def _placements(units: int, constraints: Constraints) -> Iterator[tuple[int, ...]]:
    if constraints.placement:
        yield constraints.placement
        return
    counts = [constraints.count]
    if not constraints.cuts and not constraints.stages:
        counts = [chunks * constraints.ranks for chunks in (1, 2, 3)]
    for stages in counts:
        if constraints.ranks <= stages <= units:
            yield from dict.fromkeys(
                (looped(stages, constraints.ranks), folded(stages, constraints.ranks))
            )


def even_cuts(cutter: Cutter) -> Iterator[tuple[int, ...]]:
    """Cuts whose ranks are loaded evenly, from those whose stages are; or the one by hand."""
    if cutter.constraints.cuts:
        yield cutter.constraints.cuts
        return
    units, stages = cutter.account.work.units, len(cutter.stage_ranks)
    loads = Loads(cutter)
    start = loads.even()
    if start is not None:
        yield stages_from(start, units)
        yield stages_from(loads.improved(start), units)
    by_count = borders([unit * stages // units for unit in range(units)])
    if cutter.clusters.blocked.isdisjoint(by_count):
        yield stages_from(by_count, units)


class Loads:
    """Seconds of every rank for the cuts of a cutter, given by the cluster at which each stage but
    the first starts."""

    def __init__(self, cutter: Cutter):
        work, self.clusters, self.edges = cutter.account.work, cutter.clusters, cutter.edges
        self.placement, self.units = cutter.stage_ranks, work.units
        self.before = [0.0, *accumulate(self.clusters.seconds)]
        seconds_on = {rank: clusters_of(work, rank).seconds for rank in work.elsewhere}
        self.elsewhere = {rank: [0.0, *accumulate(seconds)] for rank, seconds in seconds_on.items()}
        self.transfers = list(map(cache(self._transfers), cutter.borders))

    def _transfers(self, border: Border | None) -> list[float]:
        """Seconds of the messages over a border, by the cluster at which it is."""
        sizes = zip(self.clusters.ahead, self.clusters.back, strict=True)
        if border is None:
            return [0.0] * self.units
        return [
            (border.ahead.transfer_seconds(ahead) if ahead else 0.0)
            + (border.back.transfer_seconds(back) if back else 0.0)
            for ahead, back in sizes
        ]

    def cost(self, starts: Sequence[int]) -> tuple[float, float]:
        """The busiest rank's seconds, then what is sent and the sum of squares."""
        edges = [0, *starts, self.units]
        load = [0.0] * (1 + max(self.placement))
        for stage, (first, end) in enumerate(pairwise(edges)):
            rank = self.placement[stage]
            before = self.elsewhere.get(rank, self.before)
            load[rank] += before[end] - before[first]
        sent = sum(seconds[at] for seconds, at in zip(self.transfers[1:], starts, strict=True))
        return max(load), sent + math.sqrt(sum(value**2 for value in load))

    def even(self) -> list[int] | None:
        """Stages of about the same seconds, at borders that are open; None without enough."""
        allowed, stages = self.edges[1:-1], len(self.placement)
        if len(allowed) < stages - 1:
            return None
        starts: list[int] = []
        for stage in range(1, stages):
            goal = self.before[-1] * stage / stages
            # As many borders stay open behind it as later stages need.
            free = allowed[len(starts) : len(allowed) - (stages - 1 - stage)]
            free = [b for b in free if not starts or b > starts[-1]]
            starts.append(min(free, key=lambda b: abs(self.before[b] - goal)))
        return starts

    def improved(self, starts: Sequence[int]) -> list[int]:
        """Borders moved one by one, and by pairs of neighbours, as long as that helps."""
        # A rank may have several stages. Two borders that move together move a whole stage, which
        # changes what is sent and not how much a stage has; long steps pass over a heavy cluster.
        moves = moves_of(len(starts), (-1, 1, -3, 3, -9, 9), together=2)
        return climbed(starts, self.cost(starts), self.cost, self.edges, moves)


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
    account: Account,
    layouts: Sequence[Layout],
    constraints: Constraints,
    options: Sequence[Sequence[RecomputeOption]],
) -> list[Layout]:
    """The layouts with as little recomputed on every rank as makes room for all, half or one of
    the microbatches that want to be in flight."""
    relieved = []
    # All, half or one of the microbatches in flight: which is the best trade of waits for
    # recomputation shows in the search alone.
    for layout, share in itertools.product(layouts, (1.0, 0.5, 0.0)):
        chosen: dict[int, RecomputeOption] = {}
        for rank in range(constraints.ranks):
            # Options save bytes of one microbatch, so what is lacking is said of one, too.
            lacking = _needed(layout, rank, share, constraints) / _wanted(share, constraints)
            units = [
                unit
                for unit, stage in enumerate(layout.stage_of)
                if layout.problem.stage_ranks[stage] == rank
            ]
            at = cheapest_first(options, dict.fromkeys(units, 0), lacking)
            chosen |= {unit: options[unit][index] for unit, index in at.items() if index}
        if chosen:
            less = {u: options[u][0].saved - option.saved for u, option in chosen.items()}
            cut, placement = layout.stage_of, layout.problem.stage_ranks
            relieved.append(layout_of(account, constraints, cut, placement, Relief(chosen, less)))
    return relieved
