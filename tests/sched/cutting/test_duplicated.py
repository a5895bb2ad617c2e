"""Values that stages compute for themselves: what is cheaper than to send it."""

import pytest
import torch
from torch import nn

import pfeife
from pfeife.cost import machine
from pfeife.sched.cutting import cheap_to_recompute

CORE = machine("cpu-core")


@pytest.mark.parametrize(
    ("owned", "expected"), [((), {"arange", "mul", "sin", "add"}), (("rates",), {"arange"})]
)
def test_a_table_that_depends_on_no_parameter(owned, expected):
    """It is made of the batch and of a buffer, which may be trained on some ranks alone."""
    model = nn.Linear(4, 4)
    model.register_buffer("rates", torch.ones(4))

    def step(x):
        table = (torch.arange(4) * model.rates).sin()
        return (model(x + table).tanh() + table).mean()

    program = pfeife.fuse()(pfeife.capture(step, torch.randn(2, 4)))
    assert set(cheap_to_recompute(program, CORE, owned)) == expected
