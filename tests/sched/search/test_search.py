"""The schedule search against the judge, against brute force, and against its own bound."""

import math

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import WORK, equal, on_a_v, optimum, problems, simulated, tiny

from pfeife.data.schedule import Do
from pfeife.lowering.lower import insert_actions
from pfeife.lowering.problem import (
    Problem,
    StageCosts,
    chain_edges,
    fits,
    peak_memory,
    transfers,
)
from pfeife.lowering.verify import verify_schedule
from pfeife.sched.search.budget import Budget
from pfeife.sched.search.run import Search
from pfeife.sched.search.search import search_schedule


@pytest.mark.parametrize("chunks", [1, 2])
def test_tiny_problems_are_solved_to_the_optimum_or_are_impossible(chunks):
    impossible = 0
    for seed in range(24):
        problem = tiny(seed, chunks=chunks)
        best = optimum(problem)
        if math.isinf(best):
            impossible += 1
            with pytest.raises(ValueError, match="does not fit: rank"):
                search_schedule(problem, work=WORK)
            continue
        found = search_schedule(problem, work=WORK)
        assert found.bound <= best * (1 + 1e-9)
        assert found.seconds == pytest.approx(best), f"seed {seed}"
        assert fits(problem, found.schedule)
    assert 0 < impossible < 12


@given(problems(), st.integers(0, 99))
@settings(max_examples=100)
def test_what_is_found_is_valid_in_memory_and_above_the_bound(problem, seed):
    found = search_schedule(problem, work=WORK // 3, seed=seed)
    verify_schedule(insert_actions(found.schedule, transfers(problem)))
    assert found.seconds == pytest.approx(simulated(problem, found.schedule))
    assert fits(problem, found.schedule)
    assert found.memory == peak_memory(problem, found.schedule)
    assert found.bound <= found.seconds * (1 + 1e-9)
    assert not found.interrupted


def test_equal_stages_reach_the_published_optimum():
    # Zero Bubble (ICLR 2024): with F = I = W and memory for p microbatches, (p - 1) units idle.
    for ranks, m in ((2, 4), (4, 8), (4, 12)):
        found = search_schedule(equal(ranks, m, memory=float(ranks)), work=10 * WORK)
        assert found.seconds == 3 * m + ranks - 1 == found.bound


def test_little_memory_costs_time_but_is_kept_to():
    lengths = [
        search_schedule(equal(4, 8, memory=limit), work=4 * WORK).seconds
        for limit in (1.0, 2.0, 3.0, 4.0, None)
    ]
    assert lengths == sorted(lengths, reverse=True)
    # One at a time: nobody works while another does, but for the last W (1 s on each of 4 ranks).
    assert lengths[0] <= 8 * (4 * 2 + 4) and lengths[-1] == 27


@given(problems(), st.integers(0, 99))
@settings(max_examples=12)
def test_the_same_seed_gives_the_same_schedule(problem, seed):
    first, again = (search_schedule(problem, work=WORK // 3, seed=seed) for _ in range(2))
    assert first == again


def test_a_search_goes_on_where_it_stopped():
    problem = on_a_v(4, 8, 4.0)
    search = Search(problem, Budget.of(None, 6 * WORK), 0)
    lengths, evaluations = [], []
    for _ in range(3):
        search.run(2 * WORK)
        lengths.append(search.best)
        evaluations.append(search.evaluations)
    assert lengths == sorted(lengths, reverse=True) and evaluations == sorted(set(evaluations))
    whole = search_schedule(problem, work=2 * WORK)
    assert whole.seconds == pytest.approx(lengths[0])


def test_searches_side_by_side_are_those_of_their_seeds():
    problem = attrs.evolve(on_a_v(4, 8, 5.0), memory=(5.0, 4.0, 5.0, math.inf))
    alone = [search_schedule(problem, work=WORK, seed=seed) for seed in (3, 4)]
    together = search_schedule(problem, work=WORK, seed=3, jobs=2)
    best = min(alone, key=lambda found: found.seconds)
    assert together.schedule == best.schedule and together.seconds == best.seconds
    assert together.evaluations == sum(found.evaluations for found in alone)


def test_the_clock_cuts_a_search_short_and_says_so():
    problem = Problem(
        tuple(StageCosts(1 + s % 3, 1.5, 0.7, 1.0) for s in range(8)),
        tuple(range(8)),
        32,
        chain_edges(8, 0.1),
        (3.0,) * 8,
    )
    found = search_schedule(problem, seconds=0.05, work=10**9)
    assert found.interrupted and fits(problem, found.schedule)


def test_stages_that_cannot_be_split_keep_their_backward_whole():
    stages = tuple(StageCosts(1.0, 1.0, 1.0, 1.0, 0.5, s != 1) for s in range(3))
    problem = Problem(stages, (0, 1, 2), 6, chain_edges(3))
    found = search_schedule(problem, work=WORK)
    assert {a.do for a in found.schedule.ranks[1]} == {Do.FORWARD, Do.BACKWARD}
