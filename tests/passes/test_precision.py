import copy

import pytest
import torch
from hypothesis import Phase, given
from hypothesis import strategies as st
from share import random_cases

import pfeife
from pfeife.ir.verify import verify
from pfeife.passes.compose import compose
from pfeife.testing import STATIC, assert_same, check_pass, nets, plans, tied_across

HALF, FULL = torch.bfloat16, torch.float32
EXACT = {"rtol": 0, "atol": 0}
HALF_STEP = 4 * torch.finfo(HALF).eps  # what a sum of two uses loses in bfloat16, of the largest


def summed_by_torch(net, microbatches):
    """Gradients of every microbatch alone, added up in float32."""
    net, sums = copy.deepcopy(net), {}
    for (x,) in microbatches:
        net.zero_grad()
        (net(x).square().mean() / len(microbatches)).backward()
        for name, parameter in net.named_parameters():
            if parameter.grad is not None:
                found = parameter.grad.to(FULL)
                sums[name] = sums[name] + found if name in sums else found
    return sums


@given(st.data())
@random_cases(24, derandomize=True, database=None, phases=[Phase.generate])
def test_sums_in_float32_are_those_of_plain_torch(data):
    """Whatever the later passes; a weight of several stages has its parts cast before their sum."""
    net = data.draw(nets(largest=5, linear=2, operations=STATIC)).to(HALF)
    count = data.draw(st.integers(1, 4))
    microbatches = [(torch.randn(3, net.width).to(HALF),) for _ in range(count)]
    narrow = pfeife.capture(lambda x: net(x).square().mean(), *microbatches[0])
    state = pfeife.state_of(narrow, net)
    before = str(narrow)
    wide = pfeife.accumulate_in(FULL)(narrow)
    assert str(narrow) == before and str(pfeife.accumulate_in(FULL)(wide)) == str(wide)
    found = pfeife.evaluate(wide, state, microbatches)
    expected = summed_by_torch(net, microbatches)
    assert set(expected) <= set(found.gradients)
    for name, gradient in expected.items():
        assert torch.equal(found.gradients[name], gradient), name

    masters = {name: value.to(FULL) for name, value in state.items()}
    held = pfeife.master_weights(FULL)(narrow)
    given = {
        p.fqn: masters[p.fqn] if p.held else state[p.fqn] for p in held.inputs if p.fqn in state
    }
    assert_same(pfeife.evaluate(held, given, microbatches), found)
    with pytest.raises(ValueError, match=r"was captured for torch\.float32"):
        pfeife.state_of(held, net)

    fused = check_pass(pfeife.fuse(), held, given, microbatches)
    plan = data.draw(plans(fused, count))
    split = [pfeife.split_backward()] if data.draw(st.booleans()) else []
    later = compose(pfeife.partition(plan), *split, pfeife.insert_send_recv())
    tied = tied_across(plan, fused)
    if not tied:
        check_pass(later, fused, given, microbatches)
        return
    staged = pfeife.evaluate(verify(later(fused)), given, microbatches)
    for name, gradient in found.gradients.items():
        near = (
            {"rtol": 0, "atol": HALF_STEP * gradient.abs().max().item()} if name in tied else EXACT
        )
        torch.testing.assert_close(staged.gradients[name], gradient, **near)


def test_narrower_types_only():
    net = torch.nn.Linear(3, 3)
    flat = pfeife.capture(lambda x: net(x).mean(), torch.ones(2, 3))
    assert pfeife.accumulate_in(FULL)(flat) is flat
    assert str(pfeife.master_weights(FULL)(flat)) == str(flat)
    with pytest.raises(ValueError, match="a pass of flat programs"):
        pfeife.accumulate_in(torch.float64)(pfeife.fuse()(flat))
