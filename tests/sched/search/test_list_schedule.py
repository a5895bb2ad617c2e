"""Rules give schedules that fit the memory."""

from random import Random

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problems

from pfeife.lowering.problem import Problem, StageCosts, chain_edges, fits
from pfeife.sched.search.bound import lower_bound
from pfeife.sched.search.job_shop import (
    compile_problem,
    length_of,
    respects,
    schedule_of,
    starts_of,
)
from pfeife.sched.search.list_schedule import first_rules, list_schedule, mutated


@given(problems(), st.integers(0, 10**6))
@settings(max_examples=100)
def test_every_rule_gives_a_schedule_in_memory(problem, seed):
    random, shop = Random(seed), compile_problem(problem)
    rule = next(first_rules(shop))
    bound = lower_bound(problem)
    for _ in range(12):
        rule = mutated(shop, rule, random)
        made = list_schedule(shop, rule)
        assert made is not None and not made.left
        seconds, orders = made.seconds, made.orders
        starts = starts_of(shop, orders)
        assert starts is not None and respects(shop, orders)
        assert bound <= length_of(shop, starts, orders) * (1 + 1e-9)
        assert length_of(shop, starts, orders) <= seconds * (1 + 1e-9)
        assert fits(problem, schedule_of(shop, orders))


@pytest.mark.parametrize(("gap", "order"), [(1.0, "FFIIWW"), (0.25, "FFIWIW")])
def test_a_weight_backward_fills_a_wait_that_is_long_enough_for_the_rule(gap, order):
    """The second I of rank 0 can start a second after the first is over, and a W takes three."""
    problem = Problem(
        (StageCosts(1.0, 2.0, 3.0), StageCosts(1.0, 2.0, 0.0)), (0, 1), 2, chain_edges(2)
    )
    shop = compile_problem(problem)
    made = list_schedule(shop, attrs.evolve(next(first_rules(shop)), gap=gap))
    assert made is not None
    found = schedule_of(shop, made.orders, whole=False).ranks[0]
    assert "".join(action.do.value for action in found) == order
