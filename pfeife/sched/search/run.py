"""One search: families, rules, patterns, annealing, each with a share of the work."""

import math
import time
from collections.abc import Callable, Iterable
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
from pfeife.sched.search.list_schedule import list_schedule
from pfeife.sched.search.pattern import Pattern, neighbour, pattern_of, pattern_schedule
from pfeife.sched.search.pool import Candidate, Origin, Pool
from pfeife.sched.search.rules import Rule, first_rules, mutated
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
    """What one search has found, and how it goes on as long as it is given work."""

    def __init__(self, problem: Problem, budget: Budget, seed: int):
        self.problem, self.budget = problem, budget
        self.shop, self.random = compile_problem(problem), Random(seed)
        self.bound = bound_of(self.shop)
        self.goal = self.bound * (1 + 1e-9)
        self.pool, self.evaluations, self.begun = Pool(), 0, False
        self.given: tuple[float, Schedule] | None = None  # the best of the caller's, as it came
        self.families, self.rules = list(SEEDING), first_rules(self.shop)  # not yet tried
        self.patterns: list[tuple[float, Pattern]] = []  # to start with, and what they take
        self.seen = budget.seen
        self.spent, self.first, self.last = 0, 0, 1  # work, where this run of it starts and ends
        self.ahead = (_LIST_WORK + _RESULT_WORK) * self.shop.operations  # before the clock ends it

    @property
    def best(self) -> float:
        """Seconds of the shortest candidate so far, endless without any."""
        candidates = self.pool.of()
        return candidates[0].seconds if candidates else math.inf

    def run(self, work: int, *, annealing: bool = True) -> None:
        """Goes on for so many operations, less if the bound is reached or the clock says so."""
        # Each source of orders goes on up to a share of the work, and leaves the rest to the next:
        #
        #     families .1 rules .2 fewer microbatches .3 changed rules, patterns, annealing 1
        #
        # Rules are quick and rough, patterns finer, and annealing makes the best of both shorter.
        first, self.begun = not self.begun, True
        self.first, self.last = self.spent, self.spent + work
        if first:
            self._try_rule(next(self.rules))
        if self.shop.operations < _LARGE:
            self._families(0.1)
        self._first_rules(0.2)
        if first:
            self._learn(0.3)
        # With few evaluations left, each as much as a move, more rules and patterns are better.
        moves = annealing and work > _FEW_MOVES * self.shop.operations
        now = self._share()
        self._change_rules(now + (0.1 if moves else 0.5) * (1 - now))
        if not self.patterns:
            self._first_patterns()
        self._change_patterns(now + (0.4 if moves else 1.0) * (1 - now))
        if moves:
            self._anneal_best()

    def seed(self, seeds: Iterable[Schedule]) -> None:
        """Takes in the caller's schedules; those that do not fit or deadlock are left out."""
        for schedule in seeds:
            if fits(self.problem, schedule):
                try:
                    # As it came, beside its orders: these have its whole backwards as I and W.
                    self.given = min(
                        self.given or (math.inf, schedule),
                        (makespan(self.problem, schedule), schedule),
                        key=lambda pair: pair[0],
                    )
                except ValueError:
                    continue
                self._take(schedule)

    def try_family(self, family: Family, schedule: Schedule) -> None:
        """Times what a family has made if it keeps to the memory; if not, it is still to be tried
        with forwards that wait for memory."""
        self._spend(self.shop.operations * _FITS_WORK)
        if fits(self.problem, schedule):
            self.families.remove(family)
            self._spend(self.shop.operations * _TIMED_WORK)
            self._take(schedule)

    # --- work --------------------------------------------------------------------------------

    def _share(self) -> float:
        """The share of this run's work that is spent."""
        return (self.spent - self.first) / (self.last - self.first)

    def open(self, share: float = 1.0) -> bool:
        """Whether to go on, up to a share of this run's work."""
        return self._share() < share and self.best > self.goal and not self.budget.over(self.ahead)

    def _spend(self, work: int, start: float | None = None) -> None:
        self.spent += work
        self.budget.spend(work, start)

    def _keep(self, candidate: Candidate) -> None:
        self.pool.keep(candidate)
        if self.seen is not None:
            self.seen(candidate.origin.value, len(self.problem.stages), candidate.seconds)

    # --- where orders come from --------------------------------------------------------------

    def _take(self, schedule: Schedule) -> None:
        try:
            orders = orders_of(self.shop, schedule)
        except ValueError:
            return
        starts = starts_of(self.shop, orders)
        if starts is not None and respects(self.shop, orders):
            seconds = length_of(self.shop, starts, orders)
            self._keep(Candidate(seconds, orders, Origin.GIVEN))
            self.evaluations += 1

    def _families(self, share: float) -> None:
        """As many as a share of the work has time for, with forwards that wait for memory."""
        while self.open(share) and self.families:
            schedule = made(self.families.pop(0), self.problem)
            if schedule is not None:
                self._spend(self.shop.operations * _FAMILY_WORK)
                for variant in fitting(self.problem, schedule):
                    self._take(variant)

    def _try_rule(self, rule: Rule) -> None:
        start = time.monotonic()
        made = list_schedule(self.shop, rule)
        self.evaluations += 1
        self._spend(self.shop.operations * _LIST_WORK, start)
        if made is not None:
            self._keep(Candidate(made.seconds, made.orders, Origin.RULE, rule))

    def _try_pattern(self, pattern: Pattern) -> float:
        """Seconds of a pattern's schedule. One that gets stuck takes longer than any that does
        not, and the longer the more operations it leaves: so annealing finds one that runs."""
        start, operations = time.monotonic(), self.shop.operations
        made = pattern_schedule(self.shop, pattern)
        self.evaluations += 1
        self._spend((operations - made.left) * _LIST_WORK + operations, start)
        if made.left:
            alone = sum(self.shop.seconds) * self.shop.microbatches
            return alone * (1 + made.left / operations)
        self._keep(Candidate(made.seconds, made.orders, Origin.PATTERN, pattern=pattern))
        return made.seconds

    def _first_rules(self, share: float) -> None:
        """Rules from a grid, as many as a share of the work has time for."""
        while self.open(share) and (rule := next(self.rules, None)) is not None:
            self._try_rule(rule)

    def _learn(self, share: float) -> None:
        """Rules and patterns that were good for fewer microbatches, in a large problem."""
        m, few = self.shop.microbatches, 2 * self.shop.ranks
        if m < 2 * few or self.shop.operations < _LARGE or not self.open(share):
            return
        small = Search(attrs.evolve(self.problem, microbatches=few), self.budget, 0)
        # Nobody is told of its candidates, whose steps have fewer microbatches.
        small.random, small.ahead, small.seen = self.random, self.ahead, None
        small.run(max(1, int((share - self._share()) * (self.last - self.first))), annealing=False)
        self.spent += small.spent
        self.evaluations += small.evaluations
        for candidate in small.pool.of(Origin.RULE, Origin.PATTERN)[:12]:
            if not self.open(share + 0.2):
                return
            if candidate.rule is not None:  # what was no cap for few is none for all
                caps = tuple(m if cap >= few else cap for cap in candidate.rule.caps)
                self._try_rule(attrs.evolve(candidate.rule, caps=caps))
            elif candidate.pattern is not None:
                self._try_pattern(candidate.pattern)

    def _change_rules(self, share: float) -> None:
        """Changes of the best rules."""
        while self.open(share):
            ruled = [c.rule for c in self.pool.of(Origin.RULE) if c.rule is not None]
            if not ruled:
                return
            at = int(self.random.random() ** 2 * len(ruled))
            self._try_rule(mutated(self.shop, ruled[at], self.random))

    # --- patterns ----------------------------------------------------------------------------

    def _first_patterns(self) -> None:
        """Those of the best schedules of each origin, and those that families repeat."""
        for candidate in self.pool.varied(4):
            if not self.open():
                return
            pattern = self._pattern_of(candidate)
            self.patterns.append((self._try_pattern(pattern), pattern))
        repeated = patterns(self.problem)
        while self.open() and (family_pattern := next(repeated, None)) is not None:
            self._spend(_FAMILY_WORK * STRIDE * self.shop.ranks * self.shop.stages)
            self.patterns.append((self._try_pattern(family_pattern), family_pattern))

    def _pattern_of(self, candidate: Candidate) -> Pattern:
        starts = starts_of(self.shop, candidate.orders)
        assert starts is not None
        return pattern_of(self.shop, starts)

    def _change_patterns(self, share: float) -> None:
        """Annealing of the patterns to start with, the best first, then of what they became."""
        start, rounds = self._share(), 6
        self.patterns.sort(key=lambda pair: pair[0])
        for index in range(rounds):
            until = start + (share - start) * (index + 1) / rounds
            if not self.patterns or not self.open(until):
                return
            # Places 0, 1, 2, then 2, 1, 0 of what they became: the best has the last word.
            at = index if 2 * index < rounds else rounds - 1 - index
            at = min(at, len(self.patterns) - 1)
            self.patterns[at] = self._changed_pattern(self.patterns[at], until)
            if 2 * index + 2 >= rounds:
                self.patterns.sort(key=lambda pair: pair[0])

    def _changed_pattern(self, start: tuple[float, Pattern], until: float) -> tuple[float, Pattern]:
        """Annealing of a pattern, from one percent of the makespan down to nothing; the best."""
        since, random = self._share(), self.random
        (current, pattern), best = start, start
        hot = 0.01 * self.best
        while self.open(until):
            changed = neighbour(self.shop, pattern, random)
            made = self._try_pattern(changed)
            left = max(0.0, 1 - (self._share() - since) / (until - since))
            if made < current - hot * left * math.log(1 - random.random()):
                current, pattern = made, changed
                best = min(best, (made, changed), key=lambda pair: pair[0])
        return best

    # --- annealing ---------------------------------------------------------------------------

    def _anneal_best(self) -> None:
        """A short annealing of several, a longer one of those that became best."""
        rounds = ((6, 0.4, (0.3, 1.0, 0.1)), (3, 0.5, (0.3, 0.1, 1.0)), (1, 1.0, (0.2,)))
        for count, share, hots in rounds:
            chosen = self.pool.varied(count)
            left = max(0, int(share * (self.last - self.spent)))
            for index, candidate in enumerate(chosen):
                if not self.open():
                    return
                self._improve(candidate.orders, left // len(chosen), hots[index % len(hots)])

    def _improve(self, orders: Orders, work: int, hot: float) -> None:
        result = anneal(
            self.shop,
            orders,
            work=work,
            random=self.random,
            bound=self.bound,
            cooling=Cooling(hot),
            over=lambda: self.budget.over(_RESULT_WORK * self.shop.operations),
        )
        self._spend(result.work)
        self.evaluations += result.evaluations
        self._keep(Candidate(result.seconds, result.orders, Origin.ANNEALED))

    # --- the end -----------------------------------------------------------------------------

    def result(self, further: Callable[[Schedule], float] | None = None) -> SearchResult:
        """The best by the judge, who runs a backward whole where that costs nothing; by what
        `further` says of it, where more follows than the schedule."""
        judged = [self.given] if self.given else []
        judges = max(1, min(6, 20_000 // self.shop.operations))  # one takes long for large ones
        candidates = self.pool.of()[:judges]
        if further:  # then another family may be the best
            candidates += [
                candidate for candidate in self.pool.of(Origin.GIVEN) if candidate not in candidates
            ]
        for candidate in candidates[: 2 * judges]:
            judged.append(self._judged(candidate))
        if not judged:
            raise ValueError(self._too_small())
        shortest = min(judged, key=lambda pair: further(pair[1]) if further else pair[0])
        seconds, schedule = shortest
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
