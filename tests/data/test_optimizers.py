"""What an optimizer keeps of a parameter."""

import pytest
import torch
from torch import nn

from pfeife.data.optimizers import optimizer_bytes

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "Adam": (torch.optim.Adam, {}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {}),
}
COPIES = {"SGD": 0, "momentum": 1, "Adam": 2, "amsgrad": 3, "AdamW": 2}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_bytes(name):
    """What a real step of the real optimizer keeps; nothing of it is stepped."""
    kind, options = OPTIMIZERS[name]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((5, 7), (3,), (), (1, 2, 1))]
    real = kind(parameters, **options)
    state = optimizer_bytes(real)
    said = [state(p.shape, p.dtype) for p in parameters]
    assert not real.state, "the user's optimizer was stepped"
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    real.step()
    for one, parameter in zip(said, parameters, strict=True):
        kept = [v for v in real.state[parameter].values() if isinstance(v, torch.Tensor)]
        assert one == sum(value.nbytes for value in kept)
        count = 4 if name in ("Adam", "amsgrad", "AdamW") else 0  # steps are counted
        assert one == COPIES[name] * parameter.nbytes + count
    if not options:
        assert optimizer_bytes(kind)((5, 7), torch.float32) == said[0]
