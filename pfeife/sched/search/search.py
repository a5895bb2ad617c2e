"""Search for a short schedule of given stages on given ranks."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from random import Random

import attrs

from pfeife.data.schedule import Schedule
from pfeife.lowering.problem import Problem, fits, makespan, peak_memory
from pfeife.sched.search.anneal import anneal
from pfeife.sched.search.bound import bound_of
from pfeife.sched.search.list_schedule import list_schedule
from pfeife.sched.search.pattern import Pattern, neighbour, pattern_of, pattern_schedule
from pfeife.sched.search.rules import Rule, first_rules, mutated
from pfeife.sched.search.shop import (
    Orders,
    compile_problem,
    length_of,
    orders_of,
    respects,
    schedule_of,
    starts_of,
)

# Operations that a second looks at (about two thirds of what one 2020s core does in Python).
_WORK_PER_SECOND = 8_000_000
_LIST_WORK = 15  # of a list schedule, per operation of it
_LARGE = 6_000  # operations, from which on it pays to learn from a smaller problem
_FEW_MOVES = 1_500  # evaluations, with fewer of which annealing gets nowhere


@attrs.frozen
class Found:
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


def search_schedule(
    problem: Problem,
    *,
    seconds: float = 5.0,
    work: int | None = None,
    seed: int = 0,
    seeds: Iterable[Schedule] = (),
    tick: Callable[[], None] = lambda: None,
) -> Found:
    """The shortest schedule found that keeps to the memory, at most as long as any of `seeds`.

    The budget is `work`, in operations looked at: the same problem, seed and seeds give the same
    schedule. Unless given it is what an ordinary core does in `seconds`; `seconds` by the clock end
    the search in any case, and then the result says that it was `interrupted`. Seeds that do not
    fit into the memory or deadlock are left out. `tick` is called often meanwhile. Raises
    ValueError if one microbatch alone does not fit into a rank's memory.
    """
    search = _Search(problem, seconds, work, seed, tick)
    search.seed(seeds)
    search.first_rules()
    search.learn(0.3)
    # A move costs a whole evaluation: with few of them left, more rules and patterns are better.
    moves = search.work > _FEW_MOVES * search.shop.operations
    search.change_rules(0.15 if moves else 0.6)
    search.patterns(0.45 if moves else 1.0)
    if moves:
        search.anneal_best()
    return search.result()


@attrs.define(eq=False)
class _Candidate:
    seconds: float
    orders: Orders
    rule: Rule | None = None
    pattern: Pattern | None = None


class _Search:
    """The state of one search: what it found, and what is left of the budget."""

    def __init__(
        self,
        problem: Problem,
        seconds: float,
        work: int | None,
        seed: int,
        tick: Callable[[], None],
    ):
        self.problem, self.shop, self.tick = problem, compile_problem(problem), tick
        self.random = Random(seed)
        self.deadline = time.monotonic() + seconds
        self.work = int(seconds * _WORK_PER_SECOND) if work is None else work
        self.spent = self.evaluations = 0
        self.bound = bound_of(self.shop)
        self.goal = self.bound * (1 + 1e-9)
        self.found: list[_Candidate] = []
        self.given: list[tuple[float, Schedule]] = []
        self.interrupted = False

    def over(self) -> bool:
        self.tick()
        if time.monotonic() > self.deadline:
            self.interrupted = True
        return self.interrupted

    @property
    def best(self) -> float:
        return min((c.seconds for c in self.found), default=math.inf)

    def open(self, share: float = 1.0) -> bool:
        """Whether to go on, up to a share of the budget."""
        return self.spent < share * self.work and self.best > self.goal and not self.over()

    def seed(self, seeds: Iterable[Schedule]) -> None:
        """Takes in schedules that were made elsewhere."""
        for schedule in seeds:
            if not fits(self.problem, schedule):
                continue
            try:
                self.given.append((makespan(self.problem, schedule), schedule))
                orders = orders_of(self.shop, schedule)
            except ValueError:
                continue
            self.evaluations += 1
            self.spent += self.shop.operations * _LIST_WORK
            starts = starts_of(self.shop, orders)
            if starts is not None and respects(self.shop, orders):
                self.keep(_Candidate(length_of(self.shop, starts, orders), orders))

    def keep(self, candidate: _Candidate) -> None:
        """Among the best, one of each length."""
        close = 1e-6 * candidate.seconds
        kind = candidate.pattern is None
        if all(
            abs(c.seconds - candidate.seconds) > close or (c.pattern is None) != kind
            for c in self.found
        ):
            self.found = sorted([*self.found, candidate], key=lambda c: c.seconds)[:24]

    def try_rule(self, rule: Rule) -> None:
        self.evaluations += 1
        self.spent += self.shop.operations * _LIST_WORK
        made = list_schedule(self.shop, rule)
        if made is not None:
            self.keep(_Candidate(*made, rule))

    def try_pattern(self, pattern: Pattern) -> float:
        """Seconds of a pattern's schedule, infinite if there is none."""
        self.evaluations += 1
        made = pattern_schedule(self.shop, pattern)
        self.spent += self.shop.operations * (_LIST_WORK if made else _LIST_WORK // 2)
        if made is None:
            return math.inf
        self.keep(_Candidate(*made, pattern=pattern))
        return made[0]

    def first_rules(self) -> None:
        """Rules from a grid, as many as a tenth of the budget has time for."""
        for index, rule in enumerate(first_rules(self.shop)):
            if index and not self.open(0.1):
                return
            self.try_rule(rule)

    def learn(self, share: float) -> None:
        """Rules and patterns that were good for fewer microbatches, in a large problem."""
        m, few = self.shop.microbatches, 2 * self.shop.ranks
        if m < 2 * few or self.shop.operations < _LARGE or not self.open(share):
            return
        small = _Search(
            attrs.evolve(self.problem, microbatches=few), math.inf, self.work, 0, self.tick
        )
        small.deadline, small.random, small.spent = self.deadline, self.random, self.spent
        small.first_rules()
        small.change_rules(0.6 * share)
        small.patterns(share)
        self.spent, self.evaluations = small.spent, self.evaluations + small.evaluations
        self.interrupted = small.interrupted
        for candidate in small.found[:12]:
            if candidate.rule is not None:
                caps = tuple(m if cap >= few else cap for cap in candidate.rule.caps)
                self.try_rule(attrs.evolve(candidate.rule, caps=caps))
            elif candidate.pattern is not None:
                self.try_pattern(candidate.pattern)

    def change_rules(self, share: float) -> None:
        """Changes of the best rules."""
        while self.open(share):
            ruled = [c.rule for c in self.found if c.rule is not None]
            if not ruled:
                return
            at = int(self.random.random() ** 2 * min(8, len(ruled)))
            self.try_rule(mutated(self.shop, ruled[at], self.random))

    def patterns(self, share: float) -> None:
        """Patterns of the best schedules of each origin, changed by annealing."""
        began, rounds = self.spent / self.work, 4
        for index in range(rounds):
            start = self._pattern_start(index)
            until = began + (share - began) * (index + 1) / rounds
            if start is None or not self.open(until):
                return
            self._change_pattern(start, until)

    def _pattern_start(self, index: int) -> Pattern | None:
        found = [c for c in self.found if c.pattern is None]
        if index % 2:  # the best of the other origin
            ruled = found[0].rule is not None if found else False
            found = [c for c in found if (c.rule is not None) != ruled] or found
        made = [c for c in self.found if c.pattern is not None]
        if index >= 2 and made:
            return made[0].pattern
        for candidate in found:
            starts = starts_of(self.shop, candidate.orders)
            assert starts is not None
            return pattern_of(self.shop, starts)
        return None

    def _change_pattern(self, pattern: Pattern, until: float) -> None:
        """Annealing of a pattern, from one percent of the makespan down to nothing."""
        began, random = self.spent / self.work, self.random
        current = math.inf
        hot = 0.01 * self.best
        changed = pattern
        while self.open(until):
            made = self.try_pattern(changed)
            left = max(0.0, 1 - (self.spent / self.work - began) / (until - began))
            if made < current - hot * left * math.log(1 - random.random()):
                current, pattern = made, changed
            changed = neighbour(self.shop, pattern, random)

    def anneal_best(self) -> None:
        """A short annealing of several, a longer one of those that became best."""
        rounds = ((6, 0.4, (0.3, 1.0, 0.1)), (3, 0.5, (0.3, 0.1, 1.0)), (1, 1.0, (0.2,)))
        for count, share, hots in rounds:
            chosen = self._chosen(count)
            left = max(0, int(share * (self.work - self.spent)))
            for index, candidate in enumerate(chosen):
                if not self.open():
                    return
                self.improve(candidate, left // len(chosen), hots[index % len(hots)])

    def _chosen(self, count: int) -> list[_Candidate]:
        """The best of every origin first, then the best of all."""
        kinds: dict[tuple[bool, bool], _Candidate] = {}
        for c in self.found:
            kinds.setdefault((c.rule is None, c.pattern is None), c)
        first = sorted(kinds.values(), key=lambda c: c.seconds)[:count]
        return [*first, *(c for c in self.found if c not in first)][:count]

    def improve(self, candidate: _Candidate, work: int, hot: float) -> None:
        result = anneal(
            self.shop,
            candidate.orders,
            work=work,
            random=self.random,
            bound=self.bound,
            hot=hot,
            over=self.over,
        )
        self.spent += result.work
        self.evaluations += result.evaluations
        self.keep(_Candidate(result.seconds, result.orders))

    def result(self) -> Found:
        """The best by the judge, which has transfers wait for one another."""
        judged: list[tuple[float, Schedule]] = list(self.given)
        judges = max(1, min(6, 20_000 // self.shop.operations))  # one takes long for large ones
        for candidate in self.found[:judges]:
            schedule = schedule_of(self.shop, candidate.orders)
            judged.append((makespan(self.problem, schedule), schedule))
        if not judged:
            raise ValueError(self._too_small())
        seconds, schedule = min(judged, key=lambda pair: pair[0])
        return Found(
            schedule,
            seconds,
            self.bound,
            peak_memory(self.problem, schedule),
            self.evaluations,
            self.interrupted,
        )

    def _too_small(self) -> str:
        limits: Sequence[float] = self.problem.memory or ()
        short = [
            f"rank {rank} needs {self.problem.smallest_memory(rank):g} bytes and has {limit:g}"
            for rank, limit in enumerate(limits[: self.problem.ranks])
            if self.problem.smallest_memory(rank) > limit
        ]
        return f"one microbatch alone does not fit: {'; '.join(short)}"


def search_placements(
    problems: Sequence[Problem],
    *,
    seconds: float = 5.0,
    work: int | None = None,
    seed: int = 0,
    seeds: Sequence[Iterable[Schedule]] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> tuple[int, Found]:
    """The best of several problems, such as the same model on other placements, and which it is.

    A third of the budget goes to all of them alike, but for those whose bound is above what
    another one reached; the rest to the two best. `seeds[i]` are for problem i. The bound is the
    least of all. `tick` is called often meanwhile. Raises ValueError if one microbatch alone fits
    nowhere.
    """
    deadline = time.monotonic() + seconds
    work = int(seconds * _WORK_PER_SECOND) if work is None else work
    starts = [list(given) for given in seeds or [()] * len(problems)]
    found: dict[int, Found] = {}
    refused = ""
    for at, share in [(at, 0.35 / len(problems)) for at in range(len(problems))]:
        try:
            found[at] = search_schedule(
                problems[at],
                seconds=deadline - time.monotonic(),
                work=int(share * work),
                seed=seed,
                seeds=starts[at],
                tick=tick,
            )
        except ValueError as error:
            refused = str(error)
    if not found:
        raise ValueError(refused)
    bound = min(one.bound for one in found.values())
    for at in sorted(found, key=lambda at: found[at].seconds)[:2]:
        best = min(one.seconds for one in found.values())
        if found[at].bound >= best * (1 - 1e-9):
            continue
        share = 0.65 / min(2, len(found))
        again = search_schedule(
            problems[at],
            seconds=deadline - time.monotonic(),
            work=int(share * work),
            seed=seed + 1,
            seeds=[found[at].schedule, *starts[at]],
            tick=tick,
        )
        evaluations = found[at].evaluations + again.evaluations
        interrupted = found[at].interrupted or again.interrupted
        found[at] = attrs.evolve(again, evaluations=evaluations, interrupted=interrupted)
    at = min(found, key=lambda at: found[at].seconds)
    return at, attrs.evolve(
        found[at],
        bound=bound,
        evaluations=sum(one.evaluations for one in found.values()),
        interrupted=any(one.interrupted for one in found.values()),
    )
