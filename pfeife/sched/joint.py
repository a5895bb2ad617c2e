"""Cuts, placement, stages a rank and schedule searched together."""

import math
import time
from collections.abc import Callable, Sequence

import attrs

from pfeife.data.machine import Machine
from pfeife.data.plan import Plan, RecomputeOption
from pfeife.data.progress import Progress
from pfeife.data.schedule import Schedule
from pfeife.data.tried import Tried, Watched
from pfeife.data.units import size
from pfeife.ir.program import Program
from pfeife.lowering.problem import Problem, fits, makespan
from pfeife.passes import join_backward
from pfeife.sched.cutting.account import Account, units_of
from pfeife.sched.cutting.borders import (
    borders,
    clearly_less,
    climbed,
    moves_of,
    open_borders,
    stages_from,
)
from pfeife.sched.cutting.constraints import Constraints
from pfeife.sched.cutting.judged import STEPS, Score, message_seconds
from pfeife.sched.cutting.layouts import Layout, layout_of, layouts_for, lighter, short_of_memory
from pfeife.sched.cutting.memory_limit import OutOfMemory
from pfeife.sched.cutting.recompute_choice import recompute_options
from pfeife.sched.search.bound import lower_bound
from pfeife.sched.search.budget import WORK_PER_SECOND, Budget
from pfeife.sched.search.placements import Further
from pfeife.sched.search.search import search_within

SEARCH_SECONDS = 20.0  # of a search without a budget
# Seconds of a step that come after a schedule, from the stages of clusters and the problem.
After = Callable[[Sequence[int], Problem, Schedule], float]
_JUDGED = 20  # operations looked at, per operation of a schedule whose makespan is taken


@attrs.frozen
class Effort:
    """How long a search goes on: `seconds` by the clock, or `work` in operations looked at (both:
    whichever comes first; `SEARCH_SECONDS` if neither is given); where its random numbers start,
    and how many `jobs` with seeds of their own run side by side."""

    seconds: float | None = None
    work: int | None = None
    seed: int = 0
    jobs: int = 1

    def shared(self, parts: int) -> "Effort":
        """One of so many parts of what is given."""
        seconds, work = self.seconds, self.work
        return attrs.evolve(
            self, seconds=seconds and seconds / parts, work=work and max(1, work // parts)
        )

    def budget(self, progress: Progress | None = None, watched: Watched | None = None) -> Budget:
        """A budget that tells of its seconds and of the schedules that are timed. Raises ValueError
        for numbers that make no sense."""
        default = SEARCH_SECONDS if self.work is None else None
        budget = Budget.of(default if self.seconds is None else self.seconds, self.work)
        return attrs.evolve(budget, tick=_ticks(budget, progress), seen=_telling(watched))


def search_plan(
    program: Program,
    account: Account,
    constraints: Constraints,
    effort: Effort = Effort(),
    *,
    progress: Progress | None = None,
    watched: Watched | None = None,
    after: After | None = None,
) -> Plan:
    """The plan with the shortest simulated step that was found within a budget.

    With the `work` of an effort alone the plan is the same on every machine. One, two and three
    stages a rank are tried, assigned in turn and folded (V), with cuts that balance the ranks'
    loads; where memory is short also with as little recomputed as makes room. Then borders move
    under the schedule that was found, and it is searched once more. The program, whose `account` it
    is, is fused and annotated; if it is split into input- and weight-backwards, the schedules are
    too. Raises OutOfMemory if nothing fits into the memory, with the figures of what comes nearest.
    What `after` says that a step takes beyond its schedule counts where candidates are ranked, and
    is not in the plan's seconds."""
    return search_workload(
        account,
        constraints,
        effort.budget(progress, watched),
        seed=effort.seed,
        jobs=effort.jobs,
        options=lambda: _options(program, constraints.machine, account.work.duplicated),
        after=after,
    )


def _ticks(budget: Budget, progress: Progress | None) -> Callable[[], None]:
    """What tells `progress` how many seconds are over, of how many the budget is likely to last."""
    if progress is None:
        return lambda: None
    start = time.monotonic()
    total = math.ceil(min(budget.seconds_left, budget.work / WORK_PER_SECOND))
    return lambda: progress(min(int(time.monotonic() - start), total), total)


def _telling(watched: Watched | None) -> Callable[[str, int, float], None] | None:
    """What tells `watched` of the schedules that a search has timed."""
    if watched is None:
        return None
    start, best = time.monotonic(), math.inf

    def tell(source: str, stages: int, seconds: float) -> None:
        nonlocal best
        best = min(best, seconds)
        watched(Tried(time.monotonic() - start, source, stages, seconds, best))

    return tell


def _options(
    program: Program, machine: Machine, duplicated: Sequence[str]
) -> tuple[tuple[RecomputeOption, ...], ...]:
    """What every cluster may recompute; of a split program, with its backward whole again."""
    return recompute_options(join_backward()(program), machine, duplicated=duplicated, most=4)


def search_workload(
    account: Account,
    constraints: Constraints,
    budget: Budget,
    *,
    seed: int = 0,
    jobs: int = 1,
    options: Callable[[], Sequence[Sequence[RecomputeOption]]] | None = None,
    after: After | None = None,
) -> Plan:
    """The same from bare numbers; `options` is asked for what clusters may recompute (from the
    fastest option to the one that keeps least) where memory is short."""
    layouts = layouts_for(account, constraints)
    # What may be recomputed takes seconds to find out, so it is asked for only where it may help.
    if options is not None and any(short_of_memory(layout, constraints) for layout in layouts):
        layouts += lighter(account, layouts, constraints, options())
    roomy = [layout for layout in layouts if layout.shortage <= 0]
    if not roomy:
        raise _refusal(layouts, constraints)
    # Two thirds of the budget for the layouts, a sixth for their borders, the rest for the best.
    problems = [layout.problem for layout in roomy]
    judge = _further(after, roomy)
    at, result = search_within(problems, budget.part(0.65), seed=seed, jobs=jobs, further=judge)
    schedule, interrupted, bound = result.schedule, result.interrupted, None
    layout = _moved(account, constraints, roomy[at], schedule, budget.part(0.5), after)
    if result.gap > 1e-6 and not budget.over():
        _, again = search_within(
            [layout.problem],
            budget.part(1.0),
            # the first search had the seeds from `seed` to `seed + jobs - 1`
            seed=seed + jobs,
            jobs=jobs,
            seeds=[[schedule]],
            further=_further(after, [layout]),
        )
        schedule, bound = again.schedule, again.bound
        interrupted = interrupted or again.interrupted
    seconds = makespan(layout.problem, schedule)
    return Plan(
        layout.stage_of,
        schedule,
        account.work.duplicated,
        stage_seconds=tuple(stage.seconds for stage in layout.problem.stages),
        step_seconds=seconds,
        # rounding may put a bound just above the step that reaches it
        bound_seconds=min(lower_bound(layout.problem) if bound is None else bound, seconds),
        recompute=_recompute(account, layout),
        interrupted=interrupted,
    )


def _recompute(account: Account, layout: Layout) -> tuple[RecomputeOption, ...]:
    """What the stages recompute, all that their clusters do; empty if none does."""
    relief = layout.relief
    if not relief.options:
        return ()
    options = []
    for units in units_of(layout.stage_of, len(layout.problem.stages)):
        unit_options = [relief.options[unit] for unit in units if unit in relief.options]
        names = tuple(name for option in unit_options for name in option.names)
        extra = sum(option.extra_seconds for option in unit_options)
        saved = max(account.held(units).late - relief.of(units), 0)
        options.append(RecomputeOption(saved, extra, names))
    return tuple(options)


def _seconds(after: After | None, layout: Layout, schedule: Schedule) -> float:
    """The makespan of a layout's schedule, and what comes after it."""
    alone = makespan(layout.problem, schedule)
    return alone + (after(layout.stage_of, layout.problem, schedule) if after else 0)


def _further(after: After | None, layouts: Sequence[Layout]) -> Further | None:
    """What judges schedules of some layouts; None where nothing comes after."""
    return (lambda at, schedule: _seconds(after, layouts[at], schedule)) if after else None


def _moved(
    account: Account,
    constraints: Constraints,
    layout: Layout,
    schedule: Schedule,
    budget: Budget,
    after: After | None,
) -> Layout:
    """Cuts moved border by border as long as the step with the same schedule counts less by it
    (see `Score`)."""
    if constraints.cuts is not None:
        return layout
    units, starts = account.work.units, borders(layout.stage_of)
    first = _seconds(after, layout, schedule), message_seconds(layout.problem)
    score = Score(*first, constraints.tolerance)
    work = _JUDGED * sum(map(len, schedule.ranks))

    def cut_at(starts: Sequence[int]) -> Layout:
        # What is recomputed is said by cluster, so it moves with its cluster to the other stage.
        cut, placement = stages_from(starts, units), layout.problem.stage_ranks
        return layout_of(account, constraints, cut, placement, layout.relief)

    def cost(starts: Sequence[int]) -> float:
        budget.spend(work)
        candidate = cut_at(starts)
        if candidate.shortage > 0 or not fits(candidate.problem, schedule):
            return math.inf
        return score.of(_seconds(after, candidate, schedule), message_seconds(candidate.problem))

    moved = climbed(
        starts,
        score.of(*first),
        cost,
        [0, *open_borders(units, account.work.blocked), units],
        moves_of(len(starts), STEPS),
        over=lambda: budget.left < work or budget.over(work),
        less=clearly_less,
    )
    return cut_at(moved)


def _refusal(layouts: Sequence[Layout], constraints: Constraints) -> OutOfMemory:
    best = min(layouts, key=lambda layout: layout.shortage)
    return OutOfMemory(
        f"no cut fits {size(constraints.memory_limit)} a rank on {constraints.ranks} ranks: the "
        f"best lacks {size(math.ceil(best.shortage))} for one microbatch on its worst rank; use "
        "more ranks, smaller microbatches, or a larger limit",
        best.shortage,
    )
