"""One search: families, rules, patterns, annealing, each with a share of the work."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from random import Random

import attrs

from pfeife.data.schedule import Schedule
from pfeife.data.units import size
from pfeife.lowering.problem import Problem, fits, makespan, peak_memory
from pfeife.sched.families.family import Family
from pfeife.sched.search.anneal import Cooling, anneal
from pfeife.sched.search.bound import bound_of
from pfeife.sched.search.budget import Budget
from pfeife.sched.search.job_shop import (
    Orders,
    compile_problem,
    length_of,
    orders_of,
    respects,
    schedule_of,
    starts_of,
)
from pfeife.sched.search.list_schedule import Rule, first_rules, list_schedule, mutated
from pfeife.sched.search.pattern import Pattern, neighbour, pattern_of, pattern_schedule
from pfeife.sched.search.pool import Candidate, Origin, Pool
from pfeife.sched.search.seeds import SEEDING, STRIDE, fitting, made, patterns

# Operations looked at, per operation of the problem, as what they cost compares to annealing.
_LIST_WORK = 15  # of a list schedule
_FITS_WORK = 5  # of a schedule that is looked at for its memory
_TIMED_WORK = 12  # of one that is timed
_FAMILY_WORK = 120  # of a family that is built, brought to fit and timed
_RESULT_WORK = 90  # of an order that is made a schedule and judged
_LARGE = 6_000  # operations, from which on it pays to learn from a smaller problem
_FEW_MOVES = 1_500  # evaluations, with fewer of which annealing gets nowhere


@attrs.frozen
class SearchResult:
    """A schedule, its makespan and a bound of any schedule's (seconds), the peak of activations
    per rank (bytes), and how many schedules were timed. `interrupted` says that the clock ended
    the search before its budget did, so that another run may find another schedule."""

    schedule: Schedule
    seconds: float
    bound: float
    memory: tuple[float, ...]
    evaluations: int
    interrupted: bool = False

    @property
    def gap(self) -> float:
        """How much longer than the bound, as a fraction of it."""
        return self.seconds / self.bound - 1 if self.bound else 0.0


class Search:
    """What one search has found, and how it goes on as long as it is given work.

    The caller's `seeds` that do not fit or deadlock are left out. A search of fewer microbatches,
    which a `larger` one learns from, has that one's random numbers and leaves it time to end.
    """

    def __init__(
        self,
        problem: Problem,
        budget: Budget,
        seed: int,
        seeds: Iterable[Schedule] = (),
        larger: "Search | None" = None,
    ):
        self.problem, self.budget, self.shop = problem, budget, compile_problem(problem)
        self.random: Random = larger.random if larger else Random(seed)
        self.bound = bound_of(self.shop)
        self.goal = self.bound * (1 + 1e-9)
        self.pool, self.evaluations, self.spent, self.turns = Pool(), 0, 0, 0
        self.families, self.rules = list(SEEDING), first_rules(self.shop)  # not yet tried
        self.patterns: list[tuple[float, Pattern]] = []  # to start with, and what they take
        # Nobody is told of candidates whose steps have fewer microbatches.
        self.seen = None if larger else budget.seen
        # Operations that it needs to come to an end when the clock stops it.
        alone = (_LIST_WORK + _RESULT_WORK) * self.shop.operations
        self.ahead: int = larger.ahead if larger else alone
        fitting_seeds = list(_timed(problem, seeds))
        for _, schedule in fitting_seeds:
            self.take(schedule)
        # The best as it came, beside its orders: these have its whole backwards as I and W.
        self.seeded = min(fitting_seeds, key=lambda pair: pair[0], default=None)

    @property
    def best(self) -> float:
        """Seconds of the shortest candidate so far, endless without any."""
        return self.pool.best

    def run(self, work: int, *, budget: Budget | None = None, annealing: bool = True) -> None:
        """Goes on for so many operations, less if the bound is reached or the clock of the budget
        (its own unless another one is given) says so."""
        # Each source of orders goes on up to a share of the work, and leaves the rest to the next:
        #
        #     families .1 rules .2 fewer microbatches .3 changed rules, patterns, annealing 1
        #
        # Rules are quick and rough, patterns finer, and annealing makes the best of both shorter.
        turn = Turn(self, budget or self.budget, self.spent, self.spent + work)
        self.turns += 1
        if self.turns == 1:
            turn.try_rule(next(self.rules))
        if self.shop.operations < _LARGE:
            turn.try_families(0.1)
        turn.try_rules(0.2)
        if self.turns == 1:
            turn.learn(0.3)
        # With few evaluations left, each as much as a move, more rules and patterns are better.
        moves = annealing and work > _FEW_MOVES * self.shop.operations
        now = turn.share
        turn.change_rules(now + (0.1 if moves else 0.5) * (1 - now))
        if not self.patterns:
            turn.try_patterns()
        turn.change_patterns(now + (0.4 if moves else 1.0) * (1 - now))
        if moves:
            turn.anneal_best()

    def try_family(self, family: Family, schedule: Schedule, budget: Budget) -> None:
        """Times what a family has made if it keeps to the memory; if not, it is still to be tried
        with forwards that wait for memory."""
        self.spend(budget, self.shop.operations * _FITS_WORK)
        if fits(self.problem, schedule):
            self.families.remove(family)
            self.spend(budget, self.shop.operations * _TIMED_WORK)
            self.take(schedule)

    def take(self, schedule: Schedule) -> None:
        """Times a schedule's orders; one that is none of the problem's is left out."""
        try:
            orders = orders_of(self.shop, schedule)
        except ValueError:
            return
        starts = starts_of(self.shop, orders)
        if starts is not None and respects(self.shop, orders):
            self.count(0, 1)
            self.keep(Candidate(length_of(self.shop, starts, orders), orders, Origin.GIVEN))

    def keep(self, candidate: Candidate) -> None:
        """Takes a candidate in, and tells of it."""
        self.pool.keep(candidate)
        if self.seen is not None:
            self.seen(candidate.origin.value, len(self.problem.stages), candidate.seconds)

    def count(self, work: int, evaluations: int) -> None:
        """Adds up operations looked at, and schedules timed."""
        self.spent += work
        self.evaluations += evaluations

    def spend(
        self, budget: Budget, work: int, start: float | None = None, evaluations: int = 0
    ) -> None:
        """Counts what was done since a start, here and in a budget."""
        self.count(work, evaluations)
        budget.spend(work, start)

    def result(self, further: Callable[[Schedule], float] | None = None) -> SearchResult:
        """The best by the judge, who runs a backward whole where that costs nothing; by what
        `further` says of it, where more follows than the schedule."""
        judged = [self.seeded] if self.seeded else []
        judges = max(1, min(6, 20_000 // self.shop.operations))  # one takes long for large ones
        candidates = self.pool.of()[:judges]
        if further:  # then another family may be the best
            candidates += [
                candidate for candidate in self.pool.of(Origin.GIVEN) if candidate not in candidates
            ]
        judged += map(self._judged, candidates[: 2 * judges])
        if not judged:
            raise ValueError(self._too_small())
        seconds, schedule = min(judged, key=lambda pair: further(pair[1]) if further else pair[0])
        memory = peak_memory(self.problem, schedule)
        return SearchResult(
            schedule, seconds, self.bound, memory, self.evaluations, self.budget.interrupted
        )

    def _judged(self, candidate: Candidate) -> tuple[float, Schedule]:
        schedule = schedule_of(self.shop, candidate.orders)
        seconds = makespan(self.problem, schedule)
        # A whole backward sends by its W later, for which others may wait on a busy channel.
        if self.shop.contended and seconds > candidate.seconds * (1 + 1e-9):
            schedule = schedule_of(self.shop, candidate.orders, whole=False)
            seconds = makespan(self.problem, schedule)
        return seconds, schedule

    def _too_small(self) -> str:
        limits = self.problem.memory or ()
        short = [
            f"rank {rank} needs {size(self.problem.smallest_memory(rank))} and has {size(limit)}"
            for rank, limit in enumerate(limits[: self.problem.ranks])
            if self.problem.smallest_memory(rank) > limit
        ]
        return f"one microbatch alone does not fit: {'; '.join(short)}"


def _timed(problem: Problem, seeds: Iterable[Schedule]) -> Iterator[tuple[float, Schedule]]:
    """Those that keep to the memory and do not deadlock, with their seconds."""
    for schedule in seeds:
        if fits(problem, schedule):
            with suppress(ValueError):
                yield makespan(problem, schedule), schedule


@attrs.frozen(eq=False)
class Turn:
    """A search that goes on from `first` to `last` operations spent, within a budget: where its
    orders come from, each source up to a `share` of this turn's work."""

    search: Search
    budget: Budget
    first: int
    last: int

    @property
    def share(self) -> float:
        """The share of this turn's work that is spent."""
        return (self.search.spent - self.first) / (self.last - self.first)

    def open(self, share: float = 1.0) -> bool:
        """Whether to go on, up to a share of this turn's work."""
        search = self.search
        unfinished = self.share < share and search.best > search.goal
        return unfinished and not self.budget.over(search.ahead)

    def try_families(self, share: float) -> None:
        """As many as a share of the work has time for, with forwards that wait for memory."""
        search = self.search
        while self.open(share) and search.families:
            schedule = made(search.families.pop(0), search.problem)
            if schedule is not None:
                search.spend(self.budget, search.shop.operations * _FAMILY_WORK)
                for variant in fitting(search.problem, schedule):
                    search.take(variant)

    def try_rule(self, rule: Rule) -> None:
        """Keeps what a rule makes."""
        search, start = self.search, time.monotonic()
        made = list_schedule(search.shop, rule)
        search.spend(self.budget, search.shop.operations * _LIST_WORK, start, 1)
        if made is not None:
            search.keep(Candidate(made.seconds, made.orders, Origin.RULE, rule))

    def try_pattern(self, pattern: Pattern) -> float:
        """Seconds of a pattern's schedule. One that gets stuck takes longer than any that does
        not, and the longer the more operations it leaves: so annealing finds one that runs."""
        search, shop, start = self.search, self.search.shop, time.monotonic()
        made, operations = pattern_schedule(shop, pattern), shop.operations
        work = (operations - made.left) * _LIST_WORK + operations
        search.spend(self.budget, work, start, 1)
        if made.left:
            alone = sum(shop.seconds) * shop.microbatches
            return alone * (1 + made.left / operations)
        search.keep(Candidate(made.seconds, made.orders, Origin.PATTERN, pattern=pattern))
        return made.seconds

    def try_rules(self, share: float) -> None:
        """Rules from a grid, as many as a share of the work has time for."""
        while self.open(share) and (rule := next(self.search.rules, None)) is not None:
            self.try_rule(rule)

    def learn(self, share: float) -> None:
        """Rules and patterns that were good for fewer microbatches, in a large problem."""
        search = self.search
        m, few = search.shop.microbatches, 2 * search.shop.ranks
        if m < 2 * few or search.shop.operations < _LARGE or not self.open(share):
            return
        problem = attrs.evolve(search.problem, microbatches=few)
        small = Search(problem, self.budget, 0, larger=search)
        # What it spends is spent of this turn, too: both have one budget.
        work = int((share - self.share) * (self.last - self.first))
        small.run(max(1, work), annealing=False)
        search.count(small.spent, small.evaluations)
        for candidate in small.pool.of(Origin.RULE, Origin.PATTERN)[:12]:
            if not self.open(share + 0.2):
                return
            if candidate.rule is not None:  # what was no cap for few is none for all
                caps = tuple(m if cap >= few else cap for cap in candidate.rule.caps)
                self.try_rule(attrs.evolve(candidate.rule, caps=caps))
            elif candidate.pattern is not None:
                self.try_pattern(candidate.pattern)

    def change_rules(self, share: float) -> None:
        """Changes of the best rules."""
        search, random = self.search, self.search.random
        while self.open(share):
            ruled = [c.rule for c in search.pool.of(Origin.RULE) if c.rule is not None]
            if not ruled:
                return
            at = int(random.random() ** 2 * len(ruled))
            self.try_rule(mutated(search.shop, ruled[at], random))

    def try_patterns(self) -> None:
        """Those of the best schedules of each origin, and those that families repeat."""
        search, shop = self.search, self.search.shop
        for candidate in search.pool.varied(4):
            if not self.open():
                return
            starts = starts_of(shop, candidate.orders)
            assert starts is not None
            pattern = pattern_of(shop, starts)
            search.patterns.append((self.try_pattern(pattern), pattern))
        repeated = patterns(search.problem)
        while self.open() and (family_pattern := next(repeated, None)) is not None:
            search.spend(self.budget, _FAMILY_WORK * STRIDE * shop.ranks * shop.stages)
            search.patterns.append((self.try_pattern(family_pattern), family_pattern))

    def change_patterns(self, share: float) -> None:
        """Annealing of the patterns to start with, the best first, then of what they became."""
        start, rounds, patterns = self.share, 6, self.search.patterns
        patterns.sort(key=lambda pair: pair[0])
        for index in range(rounds):
            until = start + (share - start) * (index + 1) / rounds
            if not patterns or not self.open(until):
                return
            # Places 0, 1, 2, then 2, 1, 0 of what they became: the best has the last word.
            at = index if 2 * index < rounds else rounds - 1 - index
            at = min(at, len(patterns) - 1)
            patterns[at] = self.changed_pattern(patterns[at], until)
            if 2 * index + 2 >= rounds:
                patterns.sort(key=lambda pair: pair[0])

    def changed_pattern(self, start: tuple[float, Pattern], until: float) -> tuple[float, Pattern]:
        """Annealing of a pattern, from one percent of the makespan down to nothing; the best."""
        since, random = self.share, self.search.random
        (current, pattern), best = start, start
        hot = 0.01 * self.search.best
        while self.open(until):
            changed = neighbour(self.search.shop, pattern, random)
            made = self.try_pattern(changed)
            left = max(0.0, 1 - (self.share - since) / (until - since))
            # Metropolis as in `anneal`: the random number first, then what may be worse by it.
            if made < current - hot * left * math.log(1 - random.random()):
                current, pattern = made, changed
                best = min(best, (made, changed), key=lambda pair: pair[0])
        return best

    def anneal_best(self) -> None:
        """A short annealing of several, a longer one of those that became best."""
        search = self.search
        rounds = ((6, 0.4, (0.3, 1.0, 0.1)), (3, 0.5, (0.3, 0.1, 1.0)), (1, 1.0, (0.2,)))
        for count, share, hots in rounds:
            # Of every origin the best: those of one origin end in the same place.
            chosen = search.pool.varied(count)
            left = max(0, int(share * (self.last - search.spent)))
            for index, candidate in enumerate(chosen):
                if not self.open():
                    return
                cooling = Cooling(hots[index % len(hots)])
                self._improve(candidate.orders, left // len(chosen), cooling)

    def _improve(self, orders: Orders, work: int, cooling: Cooling) -> None:
        search = self.search
        result = anneal(
            search.shop,
            orders,
            work=work,
            random=search.random,
            bound=search.bound,
            cooling=cooling,
            over=lambda: self.budget.over(_RESULT_WORK * search.shop.operations),
        )
        search.spend(self.budget, result.work, evaluations=result.evaluations)
        search.keep(Candidate(result.seconds, result.orders, Origin.ANNEALED))
