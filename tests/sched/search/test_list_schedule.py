"""Rules give schedules that fit the memory."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problems

from pfeife.lowering.problem import (
    fits,
)
from pfeife.sched.search.bound import lower_bound
from pfeife.sched.search.job_shop import (
    compile_problem,
    length_of,
    respects,
    schedule_of,
    starts_of,
)
from pfeife.sched.search.list_schedule import list_schedule
from pfeife.sched.search.rules import first_rules, mutated


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
