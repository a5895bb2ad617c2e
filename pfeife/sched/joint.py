"""Cuts, placement, stages a rank and schedule searched together."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import attrs

from pfeife.outline import Group, inline, outline
from pfeife.plan import Machine, Network, Plan, RecomputeOption, Schedule
from pfeife.program import Kind, Program
from pfeife.sched.bound import lower_bound
from pfeife.sched.cuts import Clusters, cheap_to_recompute, clusters_of
from pfeife.sched.orders import folded, looped
from pfeife.sched.policies import POLICIES, policy
from pfeife.sched.problem import Problem, fits, makespan
from pfeife.sched.recompute import recompute_options
from pfeife.sched.search import Found, search_placements, search_schedule
from pfeife.sched.seeds import fitting, fused
from pfeife.sched.workload import Workload, stage_problem, workload_of

_FEW = 4000  # cuts that are looked at one by one where memory is short


@attrs.frozen
class Wishes:
    """What a plan is to keep to: the machine and its links, microbatches, ranks, bytes a rank,
    optimizer state in multiples of the parameters, stages if their number is given, and cuts
    likewise."""

    machine: Machine
    microbatches: int
    ranks: int
    memory_limit: int
    network: Network | None = None
    state_factor: float = 0.0
    stages: int | None = None
    cuts: tuple[int, ...] | None = None


@attrs.frozen
class _Layout:
    """Cuts and placement, and the problem that they make."""

    stage_of: tuple[int, ...]
    problem: Problem
    work: Workload

    @property
    def shortage(self) -> float:
        """Bytes that the worst rank lacks for one microbatch."""
        limits = self.problem.memory or ()
        return max(self.problem.smallest_memory(rank) - limit for rank, limit in enumerate(limits))


def search_plan(
    program: Program, wishes: Wishes, *, search_seconds: float = 20.0, seed: int = 0
) -> Plan:
    """The plan with the shortest simulated step that was found in `search_seconds`.

    One, two and three stages a rank are tried, dealt in turn and folded (V), with cuts that
    balance the ranks' loads; where memory is short also with as little recomputed as makes room;
    every family of schedules that fits is a seed of the search; then
    borders move under the schedule that was found, and it is searched once more. The
    program is fused and annotated; if it is split into input- and weight-backwards, the schedules
    are too. Raises ValueError if nothing fits into the memory, with the figures of what comes
    nearest.
    """
    began = time.monotonic()
    duplicated = cheap_to_recompute(program, wishes.machine)
    work, clusters = workload_of(program, duplicated), clusters_of(program, duplicated)
    left = search_seconds - (time.monotonic() - began)
    found = search_workload(
        work,
        clusters,
        wishes,
        search_seconds=left,
        seed=seed,
        options=lambda: _options(program, wishes.machine, duplicated),
    )
    return attrs.evolve(found, duplicated=duplicated)


def _options(
    program: Program, machine: Machine, duplicated: Sequence[str]
) -> tuple[tuple[RecomputeOption, ...], ...]:
    """What every cluster may recompute; of a split program, with its backward whole again."""
    flat, groups = inline(program)
    whole = {
        name: group if group.kind == Kind.FORWARD else Group(group.unit, Kind.BACKWARD)
        for name, group in groups.items()
    }
    clusters = outline(flat, whole, word="cluster")
    seconds = {call.node: call.seconds for call in program.calls}
    calls = tuple(attrs.evolve(c, seconds=seconds.get(c.node)) for c in clusters.calls)
    return recompute_options(
        attrs.evolve(clusters, calls=calls), machine, duplicated=duplicated, most=4
    )


def search_workload(
    work: Workload,
    clusters: Clusters,
    wishes: Wishes,
    *,
    search_seconds: float = 20.0,
    seed: int = 0,
    options: Callable[[], Sequence[Sequence[RecomputeOption]]] | None = None,
) -> Plan:
    """The same from bare numbers; `options` is asked for what clusters may recompute (from the
    fastest option to the one that keeps least) where memory is short."""
    deadline = time.monotonic() + search_seconds
    layouts = _layouts(work, clusters, wishes)
    if options is not None and any(_short(layout, wishes) for layout in layouts):
        layouts += _lighter(layouts, wishes, options())
    fitting_ones = [layout for layout in layouts if layout.shortage <= 0]
    if not fitting_ones:
        raise ValueError(_refusal(layouts, wishes))
    layout, found = _searched(fitting_ones, deadline, seed)
    layout, schedule = _moved(clusters, wishes, layout, found.schedule, deadline)
    left = deadline - time.monotonic()
    if left > 0.02 * search_seconds and found.gap > 1e-6:
        again = search_schedule(layout.problem, seconds=left, seed=seed + 2, seeds=[schedule])
        schedule = again.schedule
    seconds = makespan(layout.problem, schedule)
    return Plan(
        layout.stage_of,
        schedule,
        stage_seconds=tuple(stage.seconds for stage in layout.problem.stages),
        step_seconds=seconds,
        bound_seconds=min(lower_bound(layout.problem), seconds),
        recompute=_recompute(layout),
    )


def _recompute(layout: _Layout) -> tuple[RecomputeOption, ...]:
    """What the stages recompute, all that their clusters do; empty if none does."""
    if not layout.work.recompute:
        return ()
    found = []
    for stage, costs in enumerate(layout.problem.stages):
        mine = [o for u, o in layout.work.recompute.items() if layout.stage_of[u] == stage]
        names = tuple(name for option in mine for name in option.names)
        extra = sum(option.extra_seconds for option in mine)
        found.append(RecomputeOption(int(costs.saved), extra, names))
    return tuple(found)


def _short(layout: _Layout, wishes: Wishes) -> bool:
    """Whether a rank cannot hold as many microbatches as there are ranks."""
    return any(_needed(layout, rank, 1.0, wishes) > 0 for rank in range(wishes.ranks))


def _needed(layout: _Layout, rank: int, share: float, wishes: Wishes) -> float:
    """Bytes that a rank lacks to have a share of as many microbatches in flight as there are
    ranks, and one in any case."""
    count = max(1, round(share * min(wishes.ranks, wishes.microbatches)))
    limits = layout.problem.memory or ()
    return count * layout.problem.smallest_memory(rank) - limits[rank]


def _lighter(
    layouts: Sequence[_Layout], wishes: Wishes, options: Sequence[Sequence[RecomputeOption]]
) -> list[_Layout]:
    """The layouts with as little recomputed on every rank as makes room for all, half or one of
    the microbatches that want to be in flight."""
    found = []
    for layout, share in itertools.product(layouts, (1.0, 0.5, 0.0)):
        chosen: dict[int, RecomputeOption] = {}
        for rank in range(wishes.ranks):
            count = max(1, round(share * min(wishes.ranks, wishes.microbatches)))
            lacking = _needed(layout, rank, share, wishes) / count
            units = [
                unit
                for unit, stage in enumerate(layout.stage_of)
                if layout.problem.stage_ranks[stage] == rank
            ]
            chosen |= _relief(units, options, lacking)
        if chosen:
            relieved = {u: options[u][0].saved - option.saved for u, option in chosen.items()}
            work = attrs.evolve(layout.work, recompute=chosen, relieved=relieved)
            home = layout.problem.stage_ranks
            found.append(_layout(work, wishes, layout.stage_of, home))
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


def _searched(layouts: Sequence[_Layout], deadline: float, seed: int) -> tuple[_Layout, Found]:
    """The best schedule of all layouts, in two thirds of the time."""
    left = deadline - time.monotonic()
    problems = [layout.problem for layout in layouts]
    seeds = [list(_seeds(problem, 0.2 * left / len(problems))) for problem in problems]
    share = max(0.65 * (deadline - time.monotonic()), 0.05)
    at, found = search_placements(problems, seconds=share, seed=seed, seeds=seeds)
    return layouts[at], found


def _moved(
    clusters: Clusters,
    wishes: Wishes,
    layout: _Layout,
    schedule: Schedule,
    deadline: float,
) -> tuple[_Layout, Schedule]:
    """Cuts moved border by border as long as the same schedule becomes shorter by it, in half of
    the time that is left."""
    until = time.monotonic() + 0.5 * (deadline - time.monotonic())
    best, units = makespan(layout.problem, schedule), len(clusters.seconds)
    starts = [unit for unit in range(1, units) if _begins(layout.stage_of, unit)]
    loads = _Loads(clusters, layout.problem.stage_ranks, wishes.machine)
    moved = wishes.cuts is None
    while moved:
        moved = False
        for at, step in itertools.product(range(len(starts)), (-1, 1, -2, 2)):
            if time.monotonic() > until:
                return layout, schedule
            tried = [s + step if index == at else s for index, s in enumerate(starts)]
            if not loads.allowed(tried):
                continue
            other = _layout(
                layout.work, wishes, _stage_of(tried, units), layout.problem.stage_ranks
            )
            if fits(other.problem, schedule):
                seconds = makespan(other.problem, schedule)
                if seconds < best * (1 - 1e-9):
                    layout, best, starts, moved = other, seconds, tried, True
    return layout, schedule


def _begins(stage_of: Sequence[int], unit: int) -> bool:
    return stage_of[unit] != stage_of[unit - 1]


def _layouts(work: Workload, clusters: Clusters, wishes: Wishes) -> list[_Layout]:
    found: dict[tuple, _Layout] = {}
    for home in _placements(len(clusters.seconds), wishes):
        for cut in _cuts(work, clusters, wishes, home):
            if (cut, home) not in found:
                found[cut, home] = _layout(work, wishes, cut, home)
    if not found:
        count = wishes.stages or wishes.ranks
        raise ValueError(
            f"{count} stages on {wishes.ranks} ranks, but the program has only "
            f"{len(clusters.seconds)} clusters to cut between"
        )
    if all(layout.shortage > 0 for layout in found.values()):
        for home in _placements(len(clusters.seconds), wishes):
            for cut in _roomiest(work, clusters, wishes, home):
                found[cut, home] = _layout(work, wishes, cut, home)
    return list(found.values())


def _layout(work: Workload, wishes: Wishes, cut: tuple[int, ...], home: tuple[int, ...]) -> _Layout:
    problem = stage_problem(
        work,
        cut,
        home,
        wishes.microbatches,
        machine=wishes.machine,
        network=wishes.network,
        memory_limit=wishes.memory_limit,
        state_factor=wishes.state_factor,
    )
    return _Layout(cut, problem, work)


def _placements(units: int, wishes: Wishes) -> Iterator[tuple[int, ...]]:
    if wishes.cuts:
        counts = [wishes.cuts[-1] + 1]
    else:
        counts = [wishes.stages] if wishes.stages else [v * wishes.ranks for v in (1, 2, 3)]
    for stages in counts:
        if wishes.ranks <= stages <= units:
            yield from dict.fromkeys((looped(stages, wishes.ranks), folded(stages, wishes.ranks)))


def _cuts(
    work: Workload, clusters: Clusters, wishes: Wishes, home: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Cuts whose ranks are loaded evenly, from those whose stages are."""
    if wishes.cuts:
        yield wishes.cuts
        return
    loads = _Loads(clusters, home, wishes.machine)
    start = loads.even()
    if start is not None:
        yield _stage_of(start, len(clusters.seconds))
        yield _stage_of(loads.improved(start), len(clusters.seconds))
    units, stages = len(clusters.seconds), len(home)
    stage_of = [unit * stages // units for unit in range(units)]
    by_count = [unit for unit in range(1, units) if _begins(stage_of, unit)]
    if loads.allowed(by_count):
        yield _stage_of(by_count, units)


def _stage_of(starts: Sequence[int], units: int) -> tuple[int, ...]:
    return tuple(accumulate(int(unit in set(starts)) for unit in range(units)))


class _Loads:
    """Seconds of every rank for cuts, given by the cluster at which each stage but the first
    begins."""

    def __init__(self, clusters: Clusters, home: tuple[int, ...], machine: Machine):
        self.clusters, self.home = clusters, home
        self.units = len(clusters.seconds)
        self.before = [0.0, *accumulate(clusters.seconds)]
        self.transfers = [
            machine.transfer_seconds(size) if size else 0.0 for size in clusters.crossing
        ]

    def cost(self, starts: Sequence[int]) -> tuple[float, float]:
        """The busiest rank's seconds, then what is sent and the sum of squares."""
        edges = [0, *starts, self.units]
        load = [0.0] * (1 + max(self.home))
        for stage, (first, end) in enumerate(pairwise(edges)):
            load[self.home[stage]] += self.before[end] - self.before[first]
        sent = sum(self.transfers[start] for start in starts)
        return max(load), sent + math.sqrt(sum(value**2 for value in load))

    def even(self) -> list[int] | None:
        """Stages of about the same seconds, at borders that are open; None without enough."""
        allowed = [b for b in range(1, self.units) if b not in self.clusters.blocked]
        stages = len(self.home)
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
    work: Workload, clusters: Clusters, wishes: Wishes, home: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Cuts for a placement that need the least memory for one microbatch."""
    if wishes.cuts:
        return
    units, stages = len(clusters.seconds), len(home)
    allowed = [b for b in range(1, units) if b not in clusters.blocked]
    if math.comb(len(allowed), stages - 1) <= _FEW:
        every = (_stage_of(starts, units) for starts in itertools.combinations(allowed, stages - 1))
        yield min(every, key=lambda cut: _layout(work, wishes, cut, home).shortage, default=())
        return
    loads = _Loads(clusters, home, wishes.machine)
    starts = loads.even()
    if starts is None:
        return
    shortage = _layout(work, wishes, _stage_of(starts, units), home).shortage
    moved = True
    while moved and shortage > 0:
        moved = False
        for at, step in itertools.product(range(len(starts)), (-1, 1, -4, 4)):
            tried = [s + step if i == at else s for i, s in enumerate(starts)]
            if loads.allowed(tried):
                less = _layout(work, wishes, _stage_of(tried, units), home).shortage
                if less < shortage:
                    starts, shortage, moved = tried, less, True
    yield _stage_of(starts, units)


_FAMILIES = tuple(name for name in POLICIES if name not in ("naive", "breadth-first", "loops"))


def _seeds(problem: Problem, seconds: float) -> Iterator[Schedule]:
    """What the families make of a problem, as long as the time lasts."""
    deadline = time.monotonic() + seconds
    whole = not all(stage.splittable for stage in problem.stages)
    for name in _FAMILIES:
        if time.monotonic() > deadline:
            return
        try:
            order = policy(name)(len(problem.stages), problem.microbatches, problem.stage_ranks)
        except ValueError:
            continue  # not for this placement
        order = fused(order) if whole else order
        yield from fitting(problem, order)


def _refusal(layouts: Sequence[_Layout], wishes: Wishes) -> str:
    best = min(layouts, key=lambda layout: layout.shortage)
    return (
        f"no cut fits {wishes.memory_limit} bytes a rank on {wishes.ranks} ranks: the best lacks "
        f"{best.shortage:.0f} bytes for one microbatch on its worst rank; use more ranks, smaller "
        "microbatches, or a larger limit"
    )
