"""A small net, its step, and what the backend builds for it."""

from types import SimpleNamespace

import torch
from torch import nn

import pfeife
from pfeife.cost import estimate, machine
from pfeife.testing import eager_accumulation

CORE = machine("cpu-core")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Net(nn.Module):
    """Some blocks, small enough to be built in a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sigmoids(model: Net, x: torch.Tensor) -> torch.Tensor:
    """What another net computes with the same parameters."""
    for block in model.blocks:
        x = x + block.linear(x).sigmoid()
    return x


def net() -> SimpleNamespace:
    """A model, its step, and batches of any number of rows."""
    torch.manual_seed(0)
    model = Net()

    def step(x):
        return model(x).square().mean()

    return SimpleNamespace(model=model, step=step, batch=lambda rows: torch.randn(rows, 4))


def compiled(**options):
    """What was built for the net after one step, which has eager's bits."""
    one, options = net(), {"microbatches": 4, **options}
    step = pfeife.compile(one.step, **options)
    check(one, step, 8, options["microbatches"])
    return step.backend.compiled[-1]


def check(one, step, rows: int, microbatches: int) -> None:
    """One step with eager's loss and gradients."""
    x = one.batch(rows)
    expected = eager_accumulation(one.step, one.model, [(p,) for p in x.chunk(microbatches)])
    one.model.zero_grad()
    loss = step(x)
    loss.backward()
    assert torch.equal(loss, expected.loss)
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter.grad, expected.gradients[name]), name


def clusters(one=None, rows: int = 2, *, split: bool = False) -> pfeife.Program:
    one = one or net()
    passes = [pfeife.fuse(), *([pfeife.split_backward()] if split else [])]
    program = pfeife.compose(*passes)(pfeife.capture(one.step, one.batch(rows)))
    return pfeife.annotate(estimate(program, CORE))(program)
