"""Seeds of a search: what they may become, and which are left out."""

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import WORK, equal, on_a_v, problems

from pfeife.data.schedule import Do
from pfeife.lowering.problem import (
    Problem,
    StageCosts,
    chain_edges,
    fits,
    makespan,
)
from pfeife.sched.by_family import in_flight
from pfeife.sched.families import gpipe, one_f_one_b, v_min
from pfeife.sched.search.budget import Budget
from pfeife.sched.search.job_shop import (
    compile_problem,
    length_of,
    orders_of,
    schedule_of,
    starts_of,
)
from pfeife.sched.search.list_schedule import first_rules, list_schedule
from pfeife.sched.search.pattern import pattern_schedule
from pfeife.sched.search.pool import Origin
from pfeife.sched.search.run import Search
from pfeife.sched.search.search import search_schedule
from pfeife.sched.search.seeds import SEEDING, capped, fitting, made, patterns, put_off_forwards


@given(problems(skips=False), st.integers(0, 9))
def test_fusing_backwards_costs_nothing(problem, seed):
    """Transfers take no seconds: the judge has them wait for one another."""
    problem = attrs.evolve(problem, edges=chain_edges(len(problem.stages)))
    shop = compile_problem(problem)
    for rule in list(first_rules(shop))[seed::10]:
        made = list_schedule(shop, rule)
        assert made is not None
        starts = starts_of(shop, made.orders)
        assert starts is not None
        free = Problem(problem.stages, problem.stage_ranks, problem.microbatches, problem.edges)
        schedule = schedule_of(shop, made.orders)
        assert makespan(free, schedule) <= length_of(shop, starts, made.orders) * (1 + 1e-9)
        assert orders_of(shop, schedule) == made.orders


def test_backwards_that_nobody_waits_for_are_fused():
    problem = equal(3, 4)
    shop = compile_problem(problem)
    found = schedule_of(shop, orders_of(shop, one_f_one_b(3, 4)))
    assert {action.do for action in found.ranks[0]} == {Do.FORWARD, Do.BACKWARD}


def test_microbatches_are_put_off_until_there_is_room():
    problem, order = equal(4, 8, memory=4.0), gpipe(4, 8)
    for most in (1, 2, 3):
        found = capped(problem, order, most)
        assert found is not None and max(in_flight(found)) == most
    assert any(fits(problem, one) for one in fitting(problem, order))
    found = put_off_forwards(problem, order)
    assert found is not None and fits(problem, found)


def test_families_keep_whole_the_backward_of_a_stage_that_cannot_be_split():
    stages = tuple(StageCosts(1.0, 1.0, 1.0, 1.0, 0.5, s != 1) for s in range(3))
    problem = Problem(stages, (0, 1, 2), 6, chain_edges(3))
    each = [made(family, problem) for family in SEEDING]
    assert sum(schedule is not None for schedule in each) > 3
    for schedule in filter(None, each):
        assert {action.do for action in schedule.ranks[1]} == {Do.FORWARD, Do.BACKWARD}


def test_families_and_their_patterns_are_part_of_a_search():
    """By rules alone this case takes 5 % longer than V-Min does."""
    problem = on_a_v(4, 12, 4.0)
    best = makespan(problem, v_min(8, 12, problem.stage_ranks))
    found = search_schedule(problem, work=20 * WORK)
    assert found.seconds <= best * (1 + 1e-9)
    search = Search(problem, Budget.of(None, 20 * WORK), 0)
    search.run(20 * WORK)
    origins = {one.origin for one in search.pool.of()}
    assert origins == set(Origin)
    repeated = [pattern_schedule(search.shop, pattern) for pattern in patterns(problem)]
    assert sum(not made.left for made in repeated) >= 2


@given(problems(), st.integers(0, 9))
@settings(max_examples=15)
def test_a_seed_is_never_made_worse(problem, seed):
    good = search_schedule(problem, work=WORK // 2, seed=seed)
    again = search_schedule(problem, work=1, seed=seed + 1, seeds=(good.schedule,))
    assert again.seconds <= good.seconds


def test_seeds_that_do_not_fit_are_left_out():
    problem = equal(2, 4, memory=2.0)
    found = search_schedule(problem, work=WORK, seeds=(gpipe(2, 4), one_f_one_b(2, 4)))
    assert fits(problem, found.schedule) and not fits(problem, gpipe(2, 4))
    assert found.seconds <= makespan(problem, one_f_one_b(2, 4))
