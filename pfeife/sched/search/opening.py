"""What a search starts with: every family on every placement."""

from collections.abc import Iterable, Sequence
from itertools import groupby, product

from pfeife.lowering.problem import Problem
from pfeife.sched.search.budget import Budget
from pfeife.sched.search.run import Search
from pfeife.sched.search.seeds import SEEDING, made

_SHARE = 0.1  # of a budget for families
_SMALL = 4_000_000  # operations, half a second: all of such a budget, or nothing of it
_TINY = 250_000  # operations, with which rules and annealing find more than families would
_MADE_WORK = 18  # operations looked at, per operation of a schedule that is made


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
    alike = [list(group) for _, group in groupby(searches, key=_asked)]
    for search in searches:
        search.budget = opening
    for family, group in product(SEEDING, alike):
        open_, work = _may_win(group, searches), _MADE_WORK * group[0].shop.operations
        if not open_ or opening.left < work or opening.over(group[0].ahead):
            continue
        if (schedule := made(family, group[0].problem)) is not None:
            opening.spend(work)
            for search in open_:
                search.try_family(family, schedule)
    for search in searches:
        search.budget = budget
    return opening.interrupted


def _asked(search: Search) -> tuple:
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
