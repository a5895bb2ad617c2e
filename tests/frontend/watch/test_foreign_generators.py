"""Which generators a run moves, and in which line."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from pfeife.frontend.watch.foreign_generators import drawing_line, watching

np.random.randn()  # the next one of these moves nothing but a flag


class Scaled(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.layer, self.number = nn.Linear(4, 4), number

    def forward(self, x):
        x = self.layer(x)
        x = x * self.number()
        return self.layer(x)


def legacy():
    generator = np.random.RandomState(3)
    return lambda: float(generator.rand())


DRAWS = [
    lambda: random.random,
    lambda: lambda: random.choice([1, 2]),
    lambda: np.random.randn,
    lambda: np.random.rand,
    lambda: random.Random(3).random,
    lambda: np.random.default_rng(3).random,
    legacy,
]


@pytest.mark.parametrize("made", DRAWS, ids=range(len(DRAWS)))
def test_a_draw_is_noticed_and_its_line_is_told(made):
    number = made()
    model = Scaled(number)

    def run():
        model(torch.ones(2, 4))

    with watching() as moved:
        run()
    line = drawing_line(run, moved)
    # The line of the call itself, or of the lambda that it calls.
    at = {Scaled.forward.__code__.co_firstlineno + 2, number_line(number)}
    assert moved and any(line.startswith(f'File "{__file__}", line {n},') for n in at), line


def number_line(number):
    code = getattr(number, "__code__", None)
    return code.co_firstlineno if code else 0


@pytest.mark.parametrize("number", [lambda: 1.0, lambda: torch.rand(())])
def test_what_draws_by_torch_or_not_at_all_moves_nothing(number):
    model = Scaled(number)
    with watching() as moved:
        model(torch.ones(2, 4))
    assert not moved and drawing_line(lambda: model(torch.ones(2, 4)), moved) == ""
