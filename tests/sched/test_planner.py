"""Plans: the default cut, stages on ranks, and what is refused."""

import functools
from itertools import combinations

import attrs
import pytest
import torch
from models import case
from programs import CPU_CORE, annotated, fused
from small import clusters
from torch import nn

import pfeife
from pfeife import sched
from pfeife.cost import estimate, machine
from pfeife.data.link import Link
from pfeife.data.network import Network
from pfeife.data.plain import from_json, to_json
from pfeife.data.plan import Plan
from pfeife.data.replicas import Replicas
from pfeife.sched import plan
from pfeife.sched.cutting import split_at
from pfeife.sched.cutting.memory_limit import curves_of


@functools.cache
def program() -> pfeife.Program:
    one = case("DropoutNet")
    fused = pfeife.fuse()(pfeife.capture(one.step, *one.batch(2)))
    return pfeife.annotate(estimate(fused, CPU_CORE))(fused)


@pytest.mark.parametrize(
    ("width", "rows", "trained", "frozen"), [(1024, 64, 4, 0), (2048, 16, 2, 3)]
)
def test_the_default_cut_is_the_best_of_all(width, rows, trained, frozen):
    """By the planner's own judge: to add up gradients takes time, which transfers do not where
    other hardware moves the bytes."""
    h100 = machine("h100-sxm")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(trained + frozen)))
        model[trained:].requires_grad_(False)
        flat = pfeife.capture(lambda x: model(x).square().sum(), torch.randn(rows, width))
    fused = pfeife.fuse()(flat)
    fused = pfeife.annotate(estimate(fused, h100))(fused)
    for stages, microbatches in ((2, 4), (3, 8)):
        wanted = functools.partial(
            plan, fused, machine=h100, microbatches=microbatches, stages=stages
        )
        cuts = combinations(range(1, fused.units), stages - 1)
        stages_of = [[sum(c <= unit for c in cut) for unit in range(fused.units)] for cut in cuts]
        every = [wanted(cuts=stage_of).step_seconds for stage_of in stages_of]
        assert len(every) > 1 and wanted().step_seconds == pytest.approx(min(every))


def test_plans_deal_stages_to_ranks():
    made = plan(program(), machine=CPU_CORE, microbatches=3, stages=4, ranks=2)
    assert made.stage_ranks == (0, 1, 0, 1) and made.stages == 4
    assert from_json(Plan, to_json(made)) == made
    assert made.stage_seconds is not None and made.step_seconds is not None
    assert made.step_seconds >= 3 * (made.stage_seconds[1] + made.stage_seconds[3])
    with pytest.raises(ValueError, match="2 stages for 3 ranks: every rank needs a stage"):
        plan(program(), machine=CPU_CORE, microbatches=3, stages=2, ranks=3)
    with pytest.raises(ValueError, match="stages=3, but the cuts by hand make 1 stages"):
        cuts = split_at(program(), {"layers.0": "begin"})
        plan(program(), machine=CPU_CORE, microbatches=3, stages=3, cuts=cuts)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"cuts": (0, 2, 1, 1)}, "cluster 2 in stage 1 reads what cluster 1 in stage 2 makes"),
        ({"cuts": (0, 0, 2, 2)}, r"each has a cluster; look at \[1\]"),
        ({"cuts": (-1, 0, 0, 1)}, r"stages are 0 to the last one, .* look at \[-1\]"),
        ({"stages": 2, "placement": (1, 0, 7)}, "the ranks of 3 stages, and there are 2"),
        ({"ranks": 2, "placement": (0, 5)}, r"placement=\[0, 5\]: the ranks are 0 to 1"),
        ({"stages": 3, "placement": (0, 1)}, "the ranks of 2 stages, and there are 3"),
        ({"cuts": (0, 0, 1, 1), "placement": (0,)}, "the ranks of 1 stages, and there are 2"),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "search"])
def test_constraints_that_contradict_each_other(request_, words, schedule):
    asked = functools.partial(
        plan, clusters(), machine=CPU_CORE, microbatches=2, schedule=schedule, search_work=1000
    )
    with pytest.raises(ValueError, match=words):
        asked(**request_)


def test_a_step_that_is_marked_is_cut_there():
    """After the first of four layers, where half of them would be the balanced cut."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def step(x):
        return model[1:](pfeife.stage_boundary(model[0](x))).square().mean()

    program = pfeife.fuse()(pfeife.capture(step, torch.randn(2, 4)))
    program = pfeife.annotate(estimate(program, CPU_CORE))(program)
    made = plan(program, machine=CPU_CORE, microbatches=2)
    assert made.stages == 2 and made.stage_of_cluster.count(0) == 1
    with pytest.raises(ValueError, match="stages=3, but the cuts by hand make 2 stages"):
        plan(program, machine=CPU_CORE, microbatches=2, stages=3)


def test_a_rank_without_a_stage_is_for_families():
    asked = functools.partial(
        plan, clusters(), machine=CPU_CORE, microbatches=2, ranks=3, placement=(0, 1)
    )
    assert [len(actions) > 0 for actions in asked().schedule.ranks] == [True, True, False]
    with pytest.raises(ValueError, match=r"ranks \[2\] have no stage"):
        asked(schedule="search", search_work=1000)
    with pytest.raises(ValueError, match=r"ranks \[1, 6, 7, 8\] have no stage"):
        asked(schedule="search", ranks=9, placement=(0, 2, 3, 4, 5))


def test_stages_ranks_and_placements_say_each_other():
    asked = functools.partial(plan, clusters(), machine=CPU_CORE, microbatches=2)
    assert asked(ranks=3).stage_ranks == asked(stages=3).stage_ranks == (0, 1, 2)
    assert asked(placement=(0, 1, 1)).stage_ranks == (0, 1, 1)


def test_a_search_on_one_rank_recomputes_where_memory_is_short():
    """There is nothing else to search; a limit that is wide changes nothing."""
    program = annotated("GPT")
    asked = functools.partial(plan, program, machine=CPU_CORE, microbatches=2, schedule="search")
    wide = asked()
    peak = max(curve.peak for curve in curves_of(program, wide))
    tight = asked(memory_limit=peak - 1)
    assert not wide.recompute and tight.recompute
    assert max(curve.peak for curve in curves_of(program, tight)) < peak


def test_plans_need_costs():
    bare = pfeife.fuse()(program())
    with pytest.raises(ValueError, match="have no costs; annotate the program first"):
        plan(bare, machine=CPU_CORE, microbatches=1)


def test_one_rank_has_no_bubble():
    """All stages on one rank: the step takes what its computations take."""
    made = plan(program(), machine=CPU_CORE, microbatches=3, stages=3, ranks=1)
    assert made.step_seconds == pytest.approx(3 * sum(made.stage_seconds))


def test_a_search_says_how_much_of_its_time_is_over():
    program = pfeife.split_backward()(fused("GPT"))
    program = pfeife.annotate(estimate(program, CPU_CORE))(program)
    seen = []
    request = {"microbatches": 4, "ranks": 2, "schedule": "search", "search_seconds": 1.2}
    sched.plan(
        program,
        machine=CPU_CORE,
        progress=lambda *counts: seen.append(counts),
        **request,
    )
    assert seen and seen == sorted(seen)
    assert {total for _, total in seen} == {2} and {done for done, _ in seen} <= {0, 1, 2}


def test_a_measured_network_changes_the_plan():
    """Slow links put both ends of the widest border onto one rank, or at least cost more."""
    program = annotated("GPT")
    sizes, nothing = (0, 1000), (0.0, 0.0)

    def planned(latency: float):
        links = tuple(
            Link(a, b, sizes, (latency, latency + 1e-9), nothing, nothing, 0.0)
            for a, b in ((0, 1), (1, 0))
        )
        return pfeife.sched.plan(
            program,
            machine=CPU_CORE,
            microbatches=4,
            stages=2,
            network=Network(links),
        ).step_seconds

    assert planned(1.0) > 2.0 > planned(1e-6)
    seen = Network((Link(0, 1, sizes, (1.0, 3.0), (0.5, 1.5), nothing, 0.0),)).seen_by(CPU_CORE)
    assert (seen.link_latency, seen.link_bandwidth, seen.overlap) == (1.0, 500.0, 0.5)
    assert Network(()).seen_by(seen) == seen


def test_the_step_of_replicas_has_what_is_left_to_reduce():
    """As the reductions of the program itself take, of which one bucket a stage is all that can be
    known before: an average sends twice what is sent to owners."""
    program = annotated("GPT")
    far = attrs.evolve(CPU_CORE, link_bandwidth=1e6, action_seconds=0.0, overlap=1.0)
    steps = {}
    for replicas in (1, Replicas(2, "average"), Replicas(2, "shard")):
        found = sched.plan(program, machine=far, microbatches=4, stages=2, replicas=replicas)
        ranks = pfeife.apply(found, replicas)(program)
        whole = sched.predict(ranks, sched.lower(found.schedule, ranks), far)
        assert found.step_seconds == pytest.approx(whole.seconds, rel=0.02)
        steps[str(replicas)] = found.step_seconds
    alone, average, shard = steps.values()
    assert 1.5 * (shard - alone) < average - alone < 2.5 * (shard - alone) and shard > alone


def test_a_search_counts_the_reductions_of_replicas():
    """Where they take long, another plan is the best than without them: on such links, a plan that
    is searched alone and then reduces takes longer."""
    program, replicas = annotated("GPT, 3 blocks"), Replicas(4)
    slow = attrs.evolve(CPU_CORE, link_bandwidth=2e7, action_seconds=0.0, overlap=1.0)
    given = {"machine": slow, "microbatches": 4, "ranks": 2, "replicas": replicas}
    search = {"schedule": "search", "search_work": 300_000}
    found = sched.plan(program, **given, **search)
    alone = sched.plan(program, **{**given, **search, "replicas": 1})
    then = sched.plan(program, **given, schedule=alone.schedule, cuts=alone.stage_of_cluster)
    assert found.step_seconds < 0.99 * then.step_seconds
