import attrs
import pytest
import torch
from models import case
from programs import CPU_CORE, clusters

import pfeife
from pfeife import sched
from pfeife.testing import assert_same, check_pass

NORM = torch.nn.BatchNorm2d


@pytest.mark.parametrize("replicas", [1, 2])
def test_later_passes_keep_the_statistics(replicas):
    """Through all of them, and in replicas, whose microbatches are put together as those of one."""
    one = case("BatchNormNet")
    microbatches = [one.batch(2, seed) for seed in range(4)]
    plain = pfeife.capture(one.step, *microbatches[0])
    before = str(plain)
    program = pfeife.defer_batch_norm()(plain)
    norms = sum(isinstance(module, NORM) for module in one.model.modules())
    assert str(plain) == before and len(program.tracked) == norms
    state = pfeife.state_of(program, one.model)
    expected = pfeife.evaluate(program, state, microbatches)
    ordinary = pfeife.evaluate(plain, state, microbatches)
    assert_same(attrs.evolve(expected, buffers=ordinary.buffers), ordinary)
    assert {str(value.item()) for name, value in expected.buffers.items() if "num_b" in name} == {
        "1"
    }

    check_pass(pfeife.fuse(), program, state, microbatches)
    fused = clusters(program)
    plan = sched.plan(fused, machine=CPU_CORE, microbatches=4 // replicas, stages=2)
    ranks = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())
    staged = check_pass(ranks, fused, state, microbatches)
    wrapped = pfeife.dp_wrap(pfeife.Mesh(2, replicas))(staged)
    found = pfeife.evaluate(wrapped, state, microbatches)
    assert_same(found, expected, rounding=() if replicas == 1 else None)


def test_a_norm_that_is_given_its_momentum_by_name():
    """As another pass may write it; captures have all arguments in their places."""
    one = case("BatchNormNet")
    plain = pfeife.capture(one.step, *one.batch(2))
    expected = str(pfeife.defer_batch_norm()(plain))
    norms = [n for n in plain.module.graph.nodes if "batch_norm_with_update" in str(n.target)]
    for norm in norms:
        norm.kwargs = dict(zip(("momentum", "eps"), norm.args[-2:], strict=True))
        norm.args = norm.args[:-2]
    assert norms and str(pfeife.defer_batch_norm()(plain)) == expected


def test_a_pass_of_flat_programs():
    one = case("BatchNormNet")
    fused = pfeife.fuse()(pfeife.capture(one.step, *one.batch(2)))
    with pytest.raises(ValueError, match="a pass of flat programs"):
        pfeife.defer_batch_norm()(fused)
