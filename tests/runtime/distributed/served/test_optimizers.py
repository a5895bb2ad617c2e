"""Which optimizers of a process are known to have stepped."""

from types import SimpleNamespace
from typing import Any

import torch

from pfeife.runtime.distributed.served.optimizers import Optimizers


def test_a_loop_that_makes_an_optimizer_for_each_step_is_not_remembered():
    weight = torch.nn.Parameter(torch.ones(2))
    service = SimpleNamespace(begin=lambda change: None)
    asking: Any = SimpleNamespace(
        owners={weight: None}, foreign={}, keep=lambda optimizer: None, service=service
    )
    optimizers = Optimizers(asking)
    for _ in range(5):
        last = torch.optim.SGD([weight], lr=0.1)
        optimizers.before(last)
    assert len(optimizers.known) <= 2 and optimizers.known[-1]() is last
