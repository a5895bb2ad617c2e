"""Several placements searched with one budget, in this process."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby, product

import attrs

from pfeife.data.schedule import Schedule
from pfeife.lowering.problem import Problem
from pfeife.sched.search.budget import Budget
from pfeife.sched.search.run import Search, SearchResult
from pfeife.sched.search.seeds import SEEDING, made

# What a step takes with a schedule of a problem, by its place, and what follows: no less than it.
Further = Callable[[int, Schedule], float]
_SHARE = 0.1  # of a budget for families
_SMALL = 4_000_000  # operations, half a second: all of such a budget, or nothing of it
_TINY = 250_000  # operations, with which rules and annealing find more than families would
_MADE_WORK = 18  # operations looked at, per operation of a schedule that is made
_ALIKE = 0.35  # of the budget goes to all placements alike
_BEHIND = 0.02  # of the best makespan: so far behind, one has a third of the best one's time


def search_each(
    problems: Sequence[Problem],
    budget: Budget,
    seed: int,
    seeds: Sequence[Sequence[Schedule]],
    further: Further | None = None,
) -> tuple[int, SearchResult]:
    """The best of all problems, and which it is, within what is left of a budget; by `further`,
    where that is given, of what each search has found.

    The families come first, on all of them (see `try_families`). A third of the rest goes to all
    alike. With what is left those searches go on that may still win, with all that they have
    learnt, the less the further they are behind; that is looked at twice. Raises ValueError if one
    microbatch alone fits nowhere.
    """
    searches: list[Search] = []
    for problem, schedules in zip(problems, seeds, strict=True):
        if searches and budget.over(max(search.ahead for search in searches)):
            break
        searches.append(Search(problem, budget, seed, schedules))
    cut_short = try_families(searches, budget)
    cut_short |= _run_alike(searches, budget)
    for share in (0.4, 1.0):
        work = int(share * budget.left)
        for search, part in _shares(searches):
            search.run(max(1, int(part * work)))
    budget.interrupted = budget.interrupted or cut_short
    return _best(searches, further)


def try_families(searches: Sequence[Search], budget: Budget) -> bool:
    """Times every family on each problem where it keeps to the memory, and that may still win by
    its bound: with time for that, no search ends worse than any of them. Says whether the clock cut
    it short.

    The best families come first (see `POLICIES`), on all problems before the next one. A schedule
    is made once for those that differ in their costs alone, as cuts for one placement do. A small
    budget does without where memory is short: most families need more than there is, and rules find
    better schedules in the time that it takes to see that. So does a tiny one in any case.
    """
    small = budget.left < _SMALL
    if budget.left < _TINY or (small and not all(_roomy(search.problem) for search in searches)):
        return False
    opening = budget.part(1.0 if small else _SHARE)
    # Those for cuts on one placement are neighbours, as groupby wants them.
    alike = [list(group) for _, group in groupby(searches, key=_family_inputs)]
    for family, group in product(SEEDING, alike):
        open_, work = _may_win(group, searches), _MADE_WORK * group[0].shop.operations
        if not open_ or opening.left < work or opening.over(group[0].ahead):
            continue
        if (schedule := made(family, group[0].problem)) is not None:
            opening.spend(work)
            for search in open_:
                search.try_family(family, schedule, opening)
    return opening.interrupted


def _family_inputs(search: Search) -> tuple:
    """What a family's schedule depends on."""
    problem = search.problem
    splittable = all(stage.splittable for stage in problem.stages)
    return problem.stage_ranks, problem.microbatches, splittable


def _roomy(problem: Problem) -> bool:
    """Whether all microbatches may be in flight, so that every family fits."""
    return problem.memory is None or all(
        problem.microbatches * problem.smallest_memory(rank) <= room
        for rank, room in enumerate(problem.memory[: problem.ranks])
    )


def _may_win(group: Iterable[Search], searches: Iterable[Search]) -> list[Search]:
    best = min(search.best for search in searches)
    return [search for search in group if search.bound < best * (1 - 1e-9)]


def _run_alike(searches: Sequence[Search], budget: Budget) -> bool:
    """Runs them with a third of the budget, each with as much; whether the clock cut one short."""
    work = (_ALIKE if len(searches) > 1 else 1.0) * budget.left / len(searches)
    cut_short = False
    for at, search in enumerate(searches):
        if at and budget.over(search.ahead):
            break
        part = budget.part(1 / (len(searches) - at))  # the last ones have a turn as well
        search.run(max(1, int(work)), budget=part)
        cut_short |= part.interrupted
    # A budget that is over once stays over, and others may have time for a step that this one had
    # not.
    cut_short, budget.interrupted = cut_short or budget.interrupted, False
    return cut_short


def _shares(searches: Sequence[Search]) -> list[tuple[Search, float]]:
    """Those that may still win, with their parts of the time, the best first."""
    best = min(search.best for search in searches)
    if len(searches) < 2 or math.isinf(best):
        return []
    open_ = [s for s in searches if s.bound < best * (1 - 1e-9) and s.best < math.inf]
    # Those so far behind that they would have next to nothing leave it to the others.
    weights = {s: 3 ** -((s.best / best - 1) / _BEHIND) for s in open_}
    enough = {s: w for s, w in weights.items() if w > 0.05 * sum(weights.values())}
    ordered = sorted(enough, key=lambda s: s.best)
    return [(s, enough[s] / sum(enough.values())) for s in ordered]


def _best(searches: Sequence[Search], further: Further | None) -> tuple[int, SearchResult]:
    """The shortest that the judge finds among the searches that found something."""
    best = min(search.best for search in searches)
    if math.isinf(best):
        searches[0].result()  # says why
    if further is None:
        # The judge runs some backwards whole, by which those that are near may change places.
        near = [at for at, search in enumerate(searches) if search.best <= best * 1.001]
        results = {at: searches[at].result() for at in near}
        at = min(results, key=lambda at: results[at].seconds)
    else:
        results = _judged_further(searches, further)
        at = list(results)[-1]
    return at, attrs.evolve(
        results[at],
        bound=min(search.bound for search in searches),
        evaluations=sum(search.evaluations for search in searches),
    )


def _judged_further(searches: Sequence[Search], further: Further) -> dict[int, SearchResult]:
    """What searches have found, each shorter with what follows than those before; those that are
    longer alone are not asked."""
    results: dict[int, SearchResult] = {}
    shortest = math.inf
    for at, search in sorted(enumerate(searches), key=lambda pair: pair[1].best):
        if search.best >= shortest:
            break
        result = search.result(partial(further, at))
        if (seconds := further(at, result.schedule)) < shortest:
            shortest, results[at] = seconds, result
    return results
