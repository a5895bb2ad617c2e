"""Programs told apart by what they compute."""

import functools

import torch
from programs import CPU_CORE, captured
from programs import clusters as clusters_of
from small import Block, clusters, net, sigmoids

import pfeife
from pfeife import sched
from pfeife.data import plain
from pfeife.ir.digest import program_digest
from pfeife.ir.sizes import settled
from pfeife.testing import assert_same


def test_a_plan_knows_its_program():
    """By what is computed of what, whatever the batch; not by whether backwards are split."""
    digest = program_digest(clusters())
    assert program_digest(clusters(rows=5)) == digest == program_digest(clusters(split=True))
    deeper, other = net(), net()
    deeper.model.blocks.append(Block())
    other.model.forward = functools.partial(sigmoids, other.model)
    found = {digest, *(program_digest(clusters(one)) for one in (deeper, other))}
    assert len(found) == 3


def test_a_plan_holds_whether_sizes_are_open():
    """One that was made for open sizes, and read from its file, is one for those of the capture,
    and the other way round."""
    one, *_ = captured("GPT")
    microbatches = [one.batch(2, seed) for seed in range(2)]
    for value in microbatches[0]:
        for dim in range(2):
            torch._dynamo.mark_dynamic(value, dim)
    flat = pfeife.capture(one.step, *microbatches[0])
    both = [clusters_of(program) for program in (flat, settled(flat))]
    assert flat.ports(pfeife.Role.SIZE) and len({*map(program_digest, both)}) == 1
    state = pfeife.state_of(flat, one.model)
    expected = pfeife.evaluate(flat, state, microbatches)
    for made, other in (both, reversed(both)):
        plan = sched.plan(made, machine=CPU_CORE, microbatches=2, stages=3, recompute="always")
        again = plain.from_json(pfeife.Plan, plain.to_json(plan))
        assert again == plan
        found = pfeife.evaluate(pfeife.apply(again)(other), state, microbatches)
        assert_same(expected, found)
