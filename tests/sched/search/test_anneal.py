"""Moves keep orders possible, and their times right."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import by_first_rule, on_a_v, problems

from pfeife.lowering.problem import Edge, Problem, StageCosts
from pfeife.sched.search.anneal import Cooling, anneal, propose
from pfeife.sched.search.job_shop import length_of, respects, starts_of
from pfeife.sched.search.timing import Timing


@given(problems(), st.integers(0, 10**6))
@settings(max_examples=100)
def test_annealing_keeps_orders_possible_and_times_them_right(problem, seed):
    shop, made = by_first_rule(problem)
    random, cooling = Random(seed), Cooling(2.0, 0.5)
    result = anneal(shop, made.orders, work=20_000, random=random, cooling=cooling)
    starts = starts_of(shop, result.orders)
    assert starts is not None and respects(shop, result.orders)
    assert result.seconds == pytest.approx(length_of(shop, starts, result.orders))
    assert result.seconds <= made.seconds * (1 + 1e-9)


@given(problems(most_microbatches=9), st.integers(0, 10**6))
@settings(max_examples=60)
def test_moves_leave_heads_and_tails_as_a_fresh_start_has_them(problem, seed):
    moved(problem, seed)


def test_a_schedule_is_moved():
    assert moved(on_a_v(4, 12, 4.0), 0)


def moved(problem: Problem, seed: int) -> int:
    """How many of 60 moves at random were made, each with the times that a fresh start has."""
    random, (shop, made) = Random(seed), by_first_rule(problem)
    state, count = Timing(shop, made.orders), 0
    for _ in range(60):
        operation = random.choice(state.critical(random))
        move = propose(state, operation, random.choice((-4, -2, -1, 1, 2, 4)))
        rank = shop.rank_of[operation // shop.microbatches]
        if move is not None and state.move(move[1], move[2], rank):
            count += 1
            fresh = Timing(shop, state.copy())
            assert (state.end, state.tail, state.length) == (fresh.end, fresh.tail, fresh.length)
            assert (state.before, state.behind) == (fresh.before, fresh.behind)
            assert state.level == pytest.approx(fresh.level)
            firsts = [order[0] for order in fresh.sequences if order]
            assert [fresh.level[o] for o in firsts] == [fresh.takes[o] for o in firsts]
            assert respects(shop, state.copy())
    return count


def test_a_longest_path_follows_what_came_last():
    """The last of three stages reads of the first one, far away, and of the second, whose result
    is made later and is there sooner."""
    stages = tuple(StageCosts(seconds, 0.0, 0.0) for seconds in (10.0, 1.0, 1.0))
    edges = (Edge(0, 1, 0.0, 0.0), Edge(1, 2, 0.0, 0.0), Edge(0, 2, 5.0, 0.0))
    shop, made = by_first_rule(Problem(stages, (0, 1, 2), 1, edges))
    timing = Timing(shop, made.orders)
    assert timing.end[2] == 16.0 and not shop.contended
    assert timing.critical(Random(0))[-2:] == [2, 0]
