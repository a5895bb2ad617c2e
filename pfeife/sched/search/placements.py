"""Several placements searched with one budget, in this process."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import attrs

from pfeife.data.schedule import Schedule
from pfeife.lowering.problem import Problem
from pfeife.sched.search.budget import Budget
from pfeife.sched.search.opening import try_families
from pfeife.sched.search.run import Search, SearchResult

# What a step takes with a schedule of a problem, by its place, and what follows: no less than it.
Further = Callable[[int, Schedule], float]
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
    searches: dict[int, Search] = {}
    for at, problem in enumerate(problems):
        if searches and budget.over(max(search.ahead for search in searches.values())):
            break
        searches[at] = Search(problem, budget, seed)
        searches[at].seed(seeds[at])
    cut_short = try_families(list(searches.values()), budget)
    cut_short |= _run_alike(list(searches.values()), budget)
    for share in (0.4, 1.0):
        work = int(share * budget.left)
        for search, part in _shares(list(searches.values())):
            search.run(max(1, int(part * work)))
    budget.interrupted = budget.interrupted or cut_short
    return _best(searches, further)


def _run_alike(searches: Sequence[Search], budget: Budget) -> bool:
    """Runs them with a third of the budget, each with as much; whether the clock cut one short."""
    work = (_ALIKE if len(searches) > 1 else 1.0) * budget.left / len(searches)
    cut_short = False
    for at, search in enumerate(searches):
        if at and budget.over(search.ahead):
            break
        search.budget = budget.part(1 / (len(searches) - at))  # the last ones have a turn as well
        search.run(max(1, int(work)))
        cut_short |= search.budget.interrupted
        search.budget = budget
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
    weights = {s: 3 ** -((s.best / best - 1) / _BEHIND) for s in open_}
    enough = {s: w for s, w in weights.items() if w > 0.05 * sum(weights.values())}
    ordered = sorted(enough, key=lambda s: s.best)
    return [(s, enough[s] / sum(enough.values())) for s in ordered]


def _best(searches: dict[int, Search], further: Further | None) -> tuple[int, SearchResult]:
    """The shortest that the judge finds among the searches that found something."""
    best = min(search.best for search in searches.values())
    if math.isinf(best):
        next(iter(searches.values())).result()  # says why
    if further is None:
        # The judge runs some backwards whole, by which those that are near may change places.
        near = [at for at, search in searches.items() if search.best <= best * 1.001]
        results = {at: searches[at].result() for at in near}
        at = min(results, key=lambda at: results[at].seconds)
    else:
        results = _judged_further(searches, further)
        at = list(results)[-1]
    return at, attrs.evolve(
        results[at],
        bound=min(search.bound for search in searches.values()),
        evaluations=sum(search.evaluations for search in searches.values()),
    )


def _judged_further(searches: dict[int, Search], further: Further) -> dict[int, SearchResult]:
    """What searches have found, each shorter with what follows than those before; those that are
    longer alone are not asked."""
    results: dict[int, SearchResult] = {}
    shortest = math.inf
    for at, search in sorted(searches.items(), key=lambda pair: pair[1].best):
        if search.best >= shortest:
            break
        result = search.result(partial(further, at))
        if (seconds := further(at, result.schedule)) < shortest:
            shortest, results[at] = seconds, result
    return results
