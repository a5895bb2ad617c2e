"""Search for a short schedule of given stages on given ranks, or on one of several placements."""

from collections.abc import Callable, Iterable, Sequence

from pfeife.data.schedule import Schedule
from pfeife.lowering.problem import Problem
from pfeife.sched.search.budget import Budget
from pfeife.sched.search.parallel import search_side_by_side
from pfeife.sched.search.placements import Further, search_each
from pfeife.sched.search.run import SearchResult

_SECONDS = 5.0


def search_schedule(
    problem: Problem,
    *,
    seconds: float | None = None,
    work: int | None = None,
    seed: int = 0,
    seeds: Iterable[Schedule] = (),
    jobs: int = 1,
    tick: Callable[[], None] = lambda: None,
) -> SearchResult:
    """The shortest schedule found that keeps to the memory, at most as long as any of `seeds`.

    The budget is `work`, in operations looked at: the same problem, seed and seeds give the same
    schedule. Unless given it is what an ordinary core does in `seconds` (5 if neither is given);
    `seconds`, where it is not `work` alone, end the search by the clock in any case, and then the
    result says that it was `interrupted`.

    Families that are for the placement seed the search by themselves. Seeds that do not fit into
    the memory or deadlock are left out. With `jobs`, so many searches with the seeds from `seed` on
    run side by side, each in a process and with the whole budget. `tick` is called often meanwhile.
    Raises ValueError for a budget that makes no sense, or if one microbatch alone does not fit into
    a rank's memory.

    >>> costs = StageCosts(forward=1.0, input_backward=1.0, weight_backward=1.0)
    >>> problem = sched.Problem((costs, costs), (0, 1), 4, chain_edges(2, 0.5))
    >>> result = sched.search_schedule(problem, work=20_000)
    >>> result.seconds, result.bound  # no schedule is shorter than the bound
    (13.5, 13.5)
    """
    return search_placements(
        [problem], seconds=seconds, work=work, seed=seed, seeds=[seeds], jobs=jobs, tick=tick
    )[1]


def search_placements(
    problems: Sequence[Problem],
    *,
    seconds: float | None = None,
    work: int | None = None,
    seed: int = 0,
    seeds: Sequence[Iterable[Schedule]] | None = None,
    jobs: int = 1,
    tick: Callable[[], None] = lambda: None,
) -> tuple[int, SearchResult]:
    """The best of several problems, such as the same model on other placements, and which it is.

    The arguments are those of `search_schedule`; `seeds[i]` are for problem i. All placements have
    a part of the budget, those that may still win have more. The bound is the least of all. Raises
    ValueError too without problems, for seeds of another number of them, and if one microbatch
    alone fits nowhere.
    """
    seconds = _SECONDS if seconds is None and work is None else seconds
    budget = Budget.of(seconds, work, tick)
    return search_within(problems, budget, seed=seed, seeds=seeds, jobs=jobs)


def search_within(
    problems: Sequence[Problem],
    budget: Budget,
    *,
    seed: int = 0,
    seeds: Sequence[Iterable[Schedule]] | None = None,
    jobs: int = 1,
    further: Further | None = None,
) -> tuple[int, SearchResult]:
    """`search_placements` with what is left of a budget; the last candidates are judged by
    `further`, where more follows than their schedules."""
    if not problems:
        raise ValueError("problems: there is no placement to search on")
    if seeds is not None and len(seeds) != len(problems):
        raise ValueError(f"seeds: {len(seeds)} lists for {len(problems)} problems")
    if type(jobs) is not int or jobs < 1:
        raise ValueError(f"jobs={jobs!r}: searches side by side, at least one")
    seeds_of = [tuple(schedules) for schedules in seeds or [()] * len(problems)]
    if jobs > 1:
        return search_side_by_side(problems, budget, seed, seeds_of, jobs, further)
    return search_each(problems, budget, seed, seeds_of, further)
