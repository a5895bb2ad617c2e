"""What a plan decides, applied at once."""

import attrs
import pytest
from programs import captured
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
