"""Optimizers that are not torch's are tried: what draws is noticed, and no generator has moved."""

import random

import numpy
import pytest
import torch

from pfeife.runtime.distributed.state.optimizer_probe import why_not_apart


class Noisy(torch.optim.Optimizer):
    """One that adds noise to its parameters; `draw` gives it."""

    def __init__(self, draw, generator=None):
        super().__init__([torch.nn.Parameter(torch.ones(3, 3)) for _ in range(2)], {})
        self.draw, self.generator = draw, generator

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad + self.draw(self))


DRAWS = {
    "torch": lambda optimizer: torch.randn(()),
    "torch's, its own": lambda optimizer: torch.randn((), generator=optimizer.generator),
    "python": lambda optimizer: random.random(),
    "python's, its own": lambda optimizer: optimizer.generator.random(),
    "numpy": lambda optimizer: numpy.random.rand(),
}
OWN = {"torch's, its own": torch.Generator, "python's, its own": lambda: random.Random(0)}


def states(optimizer):
    own = optimizer.generator
    mine = own.get_state().tolist() if isinstance(own, torch.Generator) else own and own.getstate()
    everybodys = torch.get_rng_state().tolist(), random.getstate()
    return *everybodys, str(numpy.random.get_state(legacy=False)), mine


@pytest.mark.parametrize("kind", DRAWS)
def test_an_optimizer_that_draws(kind):
    optimizer = Noisy(DRAWS[kind], OWN.get(kind, lambda: None)())
    torch.manual_seed(7)
    before = states(optimizer)
    assert why_not_apart(optimizer).startswith("draws random numbers")
    assert states(optimizer) == before


def test_an_optimizer_that_does_not_draw():
    optimizer = Noisy(lambda optimizer: 0.5)
    before = states(optimizer)
    assert not why_not_apart(optimizer)
    assert states(optimizer) == before
