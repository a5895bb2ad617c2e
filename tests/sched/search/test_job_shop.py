"""Orders of a shop are timed as the judge times schedules."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import problems

from pfeife.lowering.problem import (
    Edge,
    makespan,
)
from pfeife.sched.search.job_shop import compile_problem, length_of, schedule_of, starts_of
from pfeife.sched.search.list_schedule import first_rules, list_schedule
from pfeife.sched.search.timing import Timing


@given(problems(), st.sampled_from([0.0, 0.2, 1.5]), st.integers(0, 99))
def test_transfers_wait_for_one_another_as_the_judge_has_it(problem, lag, at):
    edges = tuple(Edge(e.source, e.destination, lag, 0.7 * lag) for e in problem.edges)
    problem = attrs.evolve(problem, edges=edges)
    shop = compile_problem(problem)
    rules = list(first_rules(shop))
    made = list_schedule(shop, rules[at % len(rules)])
    assert made is not None
    seconds = makespan(problem, schedule_of(shop, made.orders, whole=False))
    starts = starts_of(shop, made.orders)
    assert starts is not None
    assert length_of(shop, starts, made.orders) == pytest.approx(seconds)
    assert Timing(shop, made.orders).length == pytest.approx(seconds)
