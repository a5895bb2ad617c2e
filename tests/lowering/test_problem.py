"""Problems: what is refused, and how the judge times a schedule."""

import math

import attrs
import pytest
from hypothesis import given
from problems import equal, problems, simulated

from pfeife.data.schedule import Schedule
from pfeife.lowering.problem import (
    Edge,
    Problem,
    StageCosts,
    chain_edges,
    makespan,
)
from pfeife.sched.families import gpipe, one_f_one_b
from pfeife.sched.search.bound import lower_bound
from pfeife.sched.search.job_shop import compile_problem


def test_channels_are_contended_where_transfers_take_longer_than_what_sends():
    for lag, contended in ((0.9, False), (1.1, True)):
        problem = attrs.evolve(equal(3, 4), edges=chain_edges(3, lag))
        assert compile_problem(problem).contended == contended
    twice = attrs.evolve(
        equal(3, 4), stage_ranks=(0, 1, 1), edges=(Edge(0, 1, 0.1), Edge(0, 2, 0.1))
    )
    assert compile_problem(twice).contended


@given(problems(most_chunks=1, tight=False))
def test_the_judge_agrees_with_the_simulator_on_families(problem):
    problem = Problem(
        problem.stages, problem.stage_ranks, problem.microbatches, problem.edges, None
    )
    for family in (gpipe, one_f_one_b):
        schedule = family(len(problem.stages), problem.microbatches)
        assert makespan(problem, schedule) == pytest.approx(simulated(problem, schedule))
        assert lower_bound(problem) <= makespan(problem, schedule) * (1 + 1e-9)


def test_the_judge_refuses_what_does_not_belong_to_the_problem():
    problem = equal(2, 2)
    with pytest.raises(ValueError, match="2 microbatches of every stage"):
        makespan(problem, gpipe(2, 3))
    with pytest.raises(ValueError, match="on rank"):
        makespan(problem, gpipe(2, 2, ranks=(1, 0)))
    whole = Problem((StageCosts(1, 1, 1, splittable=False),) * 2, (0, 1), 2, chain_edges(2))
    with pytest.raises(ValueError, match="cannot be split"):
        makespan(whole, Schedule.from_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1B0,1F1,1B1"))
    with pytest.raises(ValueError, match=r"deadlocks: rank 0 waits at \[0B0\]"):
        makespan(problem, Schedule.from_csv("0B0,0F0,0F1,0B1\n1F0,1B0,1F1,1B1"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage_ranks": (0,)}, "2 stages on ranks"),
        ({"microbatches": 0}, "at least one"),
        ({"edges": (Edge(1, 0),)}, "edge 1 -> 0"),
        ({"edges": (Edge(0, 1), Edge(0, 1))}, "twice"),
        ({"memory": (1.0,)}, "1 memory limits for 2 ranks"),
        ({"memory": (1.0, -1.0)}, r"memory\[1\] must not be negative, but is -1"),
        ({"memory": (math.nan, 1.0)}, r"memory\[0\] .* is nan"),
        ({"memory": ("1", 1.0)}, r"memory\[0\] must be a number, not '1'"),
        ({"microbatches": 1.5}, r"Problem.microbatches=1.5"),
        ({"stage_ranks": (0, 0.5)}, "Problem.stage_ranks"),
        (
            {"stages": (StageCosts(1e12, 1, 1),) * 2, "microbatches": 10**300},
            "the seconds of .* microbatches add up",
        ),
        ({"stages": (StageCosts(1, 1, 1, 1e308),) * 2}, "the saved bytes of 1 microbatches"),
        ({"stages": (StageCosts(1, 1, 1, 1, 2),) * 2}, "keeps 2 of 1"),
    ],
)
def test_problems_that_make_no_sense_are_refused(change, message):
    good = {
        "stages": (StageCosts(1, 1, 1),) * 2,
        "stage_ranks": (0, 1),
        "microbatches": 1,
        "edges": chain_edges(2),
    }
    with pytest.raises(ValueError, match=message):
        Problem(**(good | change))
    with pytest.raises(ValueError, match="must not be negative, but is -1"):
        StageCosts(-1.0, 0, 0)
    with pytest.raises(ValueError, match=r"StageCosts.forward must be a number, not '1'"):
        StageCosts("1", 0, 0)  # type: ignore[arg-type]
