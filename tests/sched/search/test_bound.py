"""The lower bound on the length of a step."""

import pytest
from problems import WORK

from pfeife.lowering.problem import Problem, StageCosts, chain_edges
from pfeife.sched.search.bound import lower_bound, preemptive
from pfeife.sched.search.search import search_schedule


def test_preemptive_schedule_of_one_machine():
    # The short job with the long tail interrupts the long one: 0-2, 2-3 (+ 8), 3-6 (+ 1).
    assert preemptive([(0, 5, 1), (2, 1, 8)]) == 11
    assert preemptive([(0, 5, 1), (2, 1, 8), (20, 2, 3)]) == 25


@pytest.mark.parametrize(
    ("stages", "microbatches", "memory", "seconds"),
    [
        # Room for one microbatch, which its W keeps: one goes through the pipeline and back, and
        # then the next one.
        (((1, 2, 2, True), (2, 1, 1, True)), 2, 1.0, 2 * (1 + 2 + 1 + 2 + 2)),
        (((1, 2, 2, True), (2, 2, 1, True)), 2, 1.0, 2 * (1 + 2 + 2 + 2 + 2)),
        # Room for two, with whole backwards: also the last ones wait for memory.
        (((2, 2, 1, False), (1, 1, 2, False)), 4, 2.0, 23),
        (((3, 1, 2, False), (3, 1, 1, False)), 6, 2.0, 40),
    ],
)
def test_what_is_found_where_memory_is_short_is_the_least(stages, microbatches, memory, seconds):
    """The bound is as high as what a search finds."""
    costs = tuple(StageCosts(f, i, w, 1.0, 1.0, split) for f, i, w, split in stages)
    problem = Problem(costs, (0, 1), microbatches, chain_edges(2), (memory, memory))
    assert lower_bound(problem) == pytest.approx(seconds, rel=1e-5)
    assert search_schedule(problem, work=WORK).seconds == seconds
