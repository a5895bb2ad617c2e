"""Tables of plans and of memory."""

import attrs
import pytest
from programs import fused

import pfeife
from pfeife import report
from pfeife.cost import estimate, machine, memory_curves


def test_a_plan_says_what_is_held_when():
    """The tables of a plan and of memory name every rank."""
    program = pfeife.annotate(estimate(fused("GPT"), machine("cpu-core")))(fused("GPT"))
    plan = pfeife.sched.plan(program, machine=machine("cpu-core"), microbatches=4, stages=2)
    ranks = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(program)
    curves = memory_curves(ranks, pfeife.sched.lower(plan.schedule, ranks))
    with pytest.raises(ValueError, match=r"the plan has 2 stages, and the program \d+ units"):
        report.plan_table(plan, program)
    text = report.memory_table(curves)
    assert "saved" in text and "parameters" in text
    assert all(sum(c.at_peak.values()) == max(p.peak for p in c.points) for c in curves)
    bare = [attrs.evolve(curve, at_peak={}) for curve in curves]
    assert report.size(curves[0].peak) in report.memory_table(bare)
