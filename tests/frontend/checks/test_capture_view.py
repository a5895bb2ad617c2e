"""State as a step sees it while it is captured: another dtype, and no values."""

import pytest
import torch
from torch import nn

from pfeife.frontend.checks.capture_view import CaptureView


def test_what_is_shown_has_a_layout_alone():
    """Whoever reads it is told why: its memory is not there."""
    net = nn.Linear(3, 2)
    before = net.weight.detach().clone()
    presented = CaptureView(torch.bfloat16)
    presented.look(net, {}, torch.device("cpu"))
    with presented.seen():
        assert net.weight.dtype == torch.bfloat16 and net.weight.view(-1).shape == (6,)
        with pytest.raises(ValueError, match=r"aten.sum.default reads state .* param_dtype"):
            net.weight.sum()
    with presented.seen(values=True):
        assert torch.equal(net.weight, before.bfloat16())
    assert torch.equal(net.weight, before)
