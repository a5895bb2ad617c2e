"""Ranks whose machines differ: seconds and memory are those of the rank's own machine."""

import attrs
import pytest
from programs import CPU_CORE, fused

import pfeife
from pfeife import sched
from pfeife.cost import estimate
from pfeife.data.link import LinkKind
from pfeife.data.network import Network
from pfeife.sched import plan
from pfeife.sched.cutting.memory_limit import curves_of

CORE = attrs.evolve(CPU_CORE, overlap=1.0, action_seconds=0.0, launch_seconds=0.0)
HALF = attrs.evolve(
    CORE,
    name="half",
    flops={dtype: rate / 2 for dtype, rate in CORE.flops.items()},
    memory_bandwidth=CORE.memory_bandwidth / 2,
)
LINKS = Network.of(ranks_per_node=3, inside=LinkKind("quick", 1e15))


@pytest.fixture(scope="module")
def clusters() -> pfeife.Program:
    program = fused("GPT")
    return pfeife.annotate(estimate(program, CORE))(program)


def loads(made: pfeife.Plan) -> list[float]:
    """Seconds of every rank, by the plan."""
    found = [0.0] * len(made.schedule.ranks)
    for rank, seconds in zip(made.stage_ranks, made.stage_seconds or (), strict=True):
        found[rank] += seconds
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "search"])
def test_a_slow_rank_has_less_to_do(clusters, schedule):
    asked = {"microbatches": 6, "ranks": 3, "schedule": schedule, "network": LINKS}
    asked |= {"search_work": 200_000} if schedule == "search" else {}
    asked |= {"stages": 6} if schedule == "interleaved" else {}
    same = plan(clusters, machine=CORE, **asked)
    assert plan(clusters, machine=[CORE] * 3, **asked) == same
    machines = (CORE, HALF, CORE)
    mixed = plan(clusters, machine=machines, **asked)
    kept = plan(
        clusters,
        machine=machines,
        **{**asked, "schedule": same.schedule},
        cuts=same.stage_of_cluster,
    )
    assert mixed.step_seconds <= kept.step_seconds, "the cut of equal ranks"
    assert loads(kept)[1] == pytest.approx(2 * loads(same)[1])
    if schedule == "1f1b":
        assert mixed.step_seconds < kept.step_seconds


def test_the_step_is_the_one_that_is_predicted(clusters):
    """From the program of ranks, each call of which is estimated for its rank's machine. The plan
    has the adding up of gradients in the first microbatch, too."""
    machines = (CORE, HALF)
    made = plan(clusters, machine=machines, microbatches=40, network=LINKS, ranks=2)
    ranks = pfeife.apply(made)(clusters)
    ranks = pfeife.annotate(estimate(ranks, machines))(ranks)
    timeline = sched.predict(ranks, sched.lower(made.schedule, ranks), CORE, LINKS)
    assert timeline.seconds == pytest.approx(made.step_seconds, rel=0.02)
    with pytest.raises(ValueError, match="2 machines, and cluster_0_forward is on rank None"):
        estimate(clusters, machines)


@pytest.mark.parametrize("schedule", ["1f1b", "search"])
def test_each_rank_keeps_to_its_own_memory(clusters, schedule):
    asked = {"microbatches": 4, "ranks": 2, "schedule": schedule, "network": LINKS}
    asked |= {"search_work": 100_000} if schedule == "search" else {}
    peaks = [curve.peak for curve in curves_of(clusters, plan(clusters, machine=CORE, **asked))]
    small = attrs.evolve(CORE, name="small", memory=int(0.9 * peaks[1]))
    mixed = plan(clusters, machine=(CORE, small), **asked)
    now = [curve.peak for curve in curves_of(clusters, mixed)]
    assert now[1] <= small.memory < peaks[1]
    none = attrs.evolve(small, memory=1000)
    with pytest.raises(ValueError, match=r"no cut (into 2 stages )?fits|the best plan found needs"):
        plan(clusters, machine=(CORE, none), **asked)


def test_a_machine_a_rank(clusters):
    with pytest.raises(ValueError, match="3 machines for 2 ranks of a pipeline"):
        plan(clusters, machine=[CORE] * 3, microbatches=2, stages=2)
