"""Cuts, placement, stages a rank and schedule searched together."""

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import attrs

from pfeife.data.machine import Machine
from pfeife.data.plan import Plan, RecomputeOption
from pfeife.data.progress import Progress
from pfeife.data.schedule import Schedule
from pfeife.ir.program import Program
from pfeife.lowering.problem import Problem, fits, makespan
from pfeife.passes import join_backward
from pfeife.sched.cutting.cuts import Clusters, cheap_to_recompute, clusters_of
from pfeife.sched.cutting.layouts import (
    Layout,
    Loads,
    Wishes,
    begins,
    layout_of,
    layouts_for,
    lighter,
    short_of_memory,
    stages_from,
)
from pfeife.sched.cutting.recompute import recompute_options
from pfeife.sched.cutting.room import NoRoom
from pfeife.sched.cutting.workload import Workload, workload_of
from pfeife.sched.families.policies import POLICIES
from pfeife.sched.search.bound import lower_bound
from pfeife.sched.search.search import Found, search_placements, search_schedule
from pfeife.sched.search.seeds import fitting, fused


def search_plan(
    program: Program,
    wishes: Wishes,
    *,
    search_seconds: float = 20.0,
    seed: int = 0,
    at_home: Collection[str] = (),
    progress: Progress | None = None,
) -> Plan:
    """The plan with the shortest simulated step that was found in `search_seconds`.

    One, two and three stages a rank are tried, dealt in turn and folded (V), with cuts that
    balance the ranks' loads; where memory is short also with as little recomputed as makes room;
    every family of schedules that fits is a seed of the search; then
    borders move under the schedule that was found, and it is searched once more. The
    program is fused and annotated; if it is split into input- and weight-backwards, the schedules
    are too. What is `at_home` on some ranks is read there alone. Raises NoRoom if nothing fits into
    the memory, with the figures of what comes nearest.
    """
    began = time.monotonic()
    duplicated = cheap_to_recompute(program, wishes.machine, at_home)
    work, clusters = workload_of(program, duplicated), clusters_of(program, duplicated)
    left = search_seconds - (time.monotonic() - began)
    found = search_workload(
        work,
        clusters,
        wishes,
        search_seconds=left,
        seed=seed,
        options=lambda: _options(program, wishes.machine, duplicated),
        tick=_ticks(began, search_seconds, progress),
    )
    return attrs.evolve(found, duplicated=duplicated)


def _ticks(began: float, seconds: float, progress: Progress | None) -> Callable[[], None]:
    """What tells `progress` the seconds since `began`, of how many."""
    if progress is None:
        return lambda: None
    total = math.ceil(seconds)
    return lambda: progress(min(int(time.monotonic() - began), total), total)


def _options(
    program: Program, machine: Machine, duplicated: Sequence[str]
) -> tuple[tuple[RecomputeOption, ...], ...]:
    """What every cluster may recompute; of a split program, with its backward whole again."""
    return recompute_options(join_backward()(program), machine, duplicated=duplicated, most=4)


def search_workload(
    work: Workload,
    clusters: Clusters,
    wishes: Wishes,
    *,
    search_seconds: float = 20.0,
    seed: int = 0,
    options: Callable[[], Sequence[Sequence[RecomputeOption]]] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Plan:
    """The same from bare numbers; `options` is asked for what clusters may recompute (from the
    fastest option to the one that keeps least) where memory is short. `tick` is called often."""
    deadline = time.monotonic() + search_seconds
    layouts = layouts_for(work, clusters, wishes)
    if options is not None and any(short_of_memory(layout, wishes) for layout in layouts):
        layouts += lighter(layouts, wishes, options())
    fitting_ones = [layout for layout in layouts if layout.shortage <= 0]
    if not fitting_ones:
        raise NoRoom(_refusal(layouts, wishes))
    layout, found = _searched(fitting_ones, deadline, seed, tick)
    layout, schedule = _moved(clusters, wishes, layout, found.schedule, deadline)
    left = deadline - time.monotonic()
    if left > 0.02 * search_seconds and found.gap > 1e-6:
        again = search_schedule(
            layout.problem, seconds=left, seed=seed + 2, seeds=[schedule], tick=tick
        )
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


def _recompute(layout: Layout) -> tuple[RecomputeOption, ...]:
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


def _searched(
    layouts: Sequence[Layout], deadline: float, seed: int, tick: Callable[[], None]
) -> tuple[Layout, Found]:
    """The best schedule of all layouts, in two thirds of the time."""
    left = deadline - time.monotonic()
    problems = [layout.problem for layout in layouts]
    seeds = [list(_seeds(problem, 0.2 * left / len(problems))) for problem in problems]
    share = max(0.65 * (deadline - time.monotonic()), 0.05)
    at, found = search_placements(problems, seconds=share, seed=seed, seeds=seeds, tick=tick)
    return layouts[at], found


def _moved(
    clusters: Clusters,
    wishes: Wishes,
    layout: Layout,
    schedule: Schedule,
    deadline: float,
) -> tuple[Layout, Schedule]:
    """Cuts moved border by border as long as the same schedule becomes shorter by it, in half of
    the time that is left."""
    until = time.monotonic() + 0.5 * (deadline - time.monotonic())
    best, units = makespan(layout.problem, schedule), len(clusters.seconds)
    starts = [unit for unit in range(1, units) if begins(layout.stage_of, unit)]
    loads = Loads(clusters, layout.problem.stage_ranks, wishes.machine)
    moved = wishes.cuts is None
    while moved:
        moved = False
        for at, step in itertools.product(range(len(starts)), (-1, 1, -2, 2)):
            if time.monotonic() > until:
                return layout, schedule
            tried = [s + step if index == at else s for index, s in enumerate(starts)]
            if not loads.allowed(tried):
                continue
            other = layout_of(
                layout.work, wishes, stages_from(tried, units), layout.problem.stage_ranks
            )
            if fits(other.problem, schedule):
                seconds = makespan(other.problem, schedule)
                if seconds < best * (1 - 1e-9):
                    layout, best, starts, moved = other, seconds, tried, True
    return layout, schedule


_FAMILIES = tuple(family for family in POLICIES.values() if family.seeds)


def _seeds(problem: Problem, seconds: float) -> Iterator[Schedule]:
    """What the families make of a problem, as long as the time lasts."""
    deadline = time.monotonic() + seconds
    whole = not all(stage.splittable for stage in problem.stages)
    for family in _FAMILIES:
        if time.monotonic() > deadline:
            return
        try:
            order = family(len(problem.stages), problem.microbatches, problem.stage_ranks)
        except ValueError:
            continue  # not for this placement
        order = fused(order) if whole else order
        yield from fitting(problem, order)


def _refusal(layouts: Sequence[Layout], wishes: Wishes) -> str:
    best = min(layouts, key=lambda layout: layout.shortage)
    return (
        f"no cut fits {wishes.memory_limit} bytes a rank on {wishes.ranks} ranks: the best lacks "
        f"{best.shortage:.0f} bytes for one microbatch on its worst rank; use more ranks, smaller "
        "microbatches, or a larger limit"
    )
