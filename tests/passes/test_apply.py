"""What a plan decides, applied at once."""

import attrs
import pytest
from programs import captured
from programs import clusters as annotated
from recomputing import chosen, planned
from share import crossed

import pfeife
from pfeife import sched
from pfeife.runtime import LocalPipeline
from pfeife.testing import assert_same, check_pass


@pytest.mark.parametrize(
    ("policy", "budget", "are_split"), crossed(["1f1b", "zb-h1"], ["none", "full"], [False, True])
)
def test_the_passes_come_in_the_right_order(policy, budget, are_split):
    """Whatever the plan recomputes, and whether backwards are split before, or must be."""
    one, program, state, microbatches = captured("GPT")
    plan = attrs.evolve(chosen("GPT", 3, budget)[0], schedule=sched.policy(policy)(3, 4))
    clusters = planned("GPT", 3)[0]
    clusters = pfeife.split_backward()(clusters) if are_split else clusters
    ranks = check_pass(pfeife.apply(plan), clusters, state, microbatches, rounding=one.tied)
    history = pfeife.record(clusters, *pfeife.passes_of(plan, clusters))
    assert str(history[-1].program) == str(ranks)
    schedule = sched.verify_schedule(sched.lower(plan.schedule, ranks))
    found = LocalPipeline(ranks, schedule)(state, microbatches)
    assert_same(pfeife.evaluate(program, state, microbatches), found, one.tied)


def test_replicas_reduce():
    _, plan, _ = planned("GPT", 3)
    assert pfeife.apply(plan, replicas=2)(planned("GPT", 3)[0]).replicas == 2


def test_costs_stay_whatever_is_split_and_joined():
    """The parts of a backward take as long as the whole, also where a plan that recomputes makes it
    whole in between; what is computed again comes on top."""
    clusters = annotated(captured("GPT")[1])
    whole = sum(call.seconds for call in clusters.calls)
    split = pfeife.split_backward()(clusters)
    assert {call.kind for call in split.calls} > {call.kind for call in clusters.calls} - {"B"}
    plan = attrs.evolve(chosen("GPT", 3, "full")[0], schedule=sched.policy("zb-h1")(3, 4))
    extra = sum(option.extra_seconds for option in plan.recompute)
    for program in (clusters, split):
        ranks = pfeife.apply(plan)(program)
        assert sum(call.seconds for call in ranks.calls) == pytest.approx(whole + extra)
        adding = [sum(c.accumulate_seconds for c in one.calls) for one in (clusters, ranks)]
        assert adding[0] == pytest.approx(adding[1])
