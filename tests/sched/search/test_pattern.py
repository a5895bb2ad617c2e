"""Patterns give schedules that fit the memory, or none."""

from random import Random

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import WORK, by_first_rule, on_a_v, problems

from pfeife.lowering.problem import Problem
from pfeife.sched.search.budget import Budget
from pfeife.sched.search.job_shop import JobShop, respects, starts_of
from pfeife.sched.search.pattern import Pattern, neighbour, pattern_of, pattern_schedule
from pfeife.sched.search.run import Search, Turn
from pfeife.sched.search.seeds import patterns


@given(problems(), st.integers(0, 10**6))
@settings(max_examples=60)
def test_patterns_give_schedules_in_memory_or_none(problem, seed):
    shop, pattern, _ = twelve_patterns(problem, seed)
    # What leaves memory for what has started, and lets all that is there go, never gets stuck.
    assert not pattern_schedule(shop, attrs.evolve(pattern, safe=True, loose=1e9)).left


def test_neighbours_of_a_pattern_run():
    each = [twelve_patterns(on_a_v(4, 12, 4.0), seed)[2] for seed in range(8)]
    assert sum(sum(run[1:]) for run in each) >= len(each)


def twelve_patterns(problem: Problem, seed: int) -> tuple[JobShop, Pattern, list[bool]]:
    """Of a chain of neighbours the next one, and whether each gave a schedule; all that did gave
    one that runs in the memory."""
    random, (shop, made) = Random(seed), by_first_rule(problem)
    starts = starts_of(shop, made.orders)
    assert starts is not None
    pattern, run = pattern_of(shop, starts), []
    for _ in range(12):
        found = pattern_schedule(shop, pattern)
        run.append(not found.left)
        if not found.left:
            assert respects(shop, found.orders) and starts_of(shop, found.orders) is not None
        pattern = neighbour(shop, pattern, random)
    return shop, pattern, run


@pytest.mark.parametrize("seed", range(3))
def test_a_pattern_that_gets_stuck_is_changed_until_it_runs(seed):
    problem, random = on_a_v(4, 12, 4.0), Random(seed)
    search = Search(problem, Budget.of(None, 10 * WORK), seed)
    search.run(1)
    stuck = next(patterns(problem))
    while not pattern_schedule(search.shop, stuck).left:
        stuck = neighbour(search.shop, stuck, random)
    turn = Turn(search, search.budget, search.spent, search.spent + 10 * WORK)
    seconds, changed = turn.changed_pattern((turn.try_pattern(stuck), stuck), 1.0)
    made = pattern_schedule(search.shop, changed)
    assert not made.left and made.seconds == seconds
