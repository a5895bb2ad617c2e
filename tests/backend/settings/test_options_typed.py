"""Types of the options (`tests/typed.py` is what they tell), and what `pfeife.compile` returns."""

import copy
import functools
import pickle
from typing import get_type_hints

import attrs
import torch

import pfeife
from pfeife.backend.settings.options import Options
from pfeife.backend.settings.options_typed import Asked

net = torch.nn.Linear(4, 1)


@functools.partial(pfeife.compile, microbatches=2)
def loss_of(rows):
    """The loss."""
    return net(rows).square().mean()


class Trainer:
    def loss(self, rows):
        return net(rows).square().mean()

    step = pfeife.compile(loss, microbatches=2)


def test_each_option_has_a_type():
    assert list(get_type_hints(Asked)) == [field.name for field in attrs.fields(Options)]


def test_a_step_is_like_a_function():
    assert (loss_of.__name__, loss_of.__doc__) == ("loss_of", "The loss.")
    assert copy.deepcopy(loss_of) is loss_of and b"loss_of" in pickle.dumps(loss_of)  # by its name
    rows = torch.randn(4, 4)
    assert torch.equal(loss_of(rows), Trainer().step(rows))
    assert Trainer.step.backend.options.microbatches == 2
    inside = torch.compile(lambda: loss_of(rows), backend="eager", fullgraph=True)
    assert torch.equal(inside(), loss_of.__wrapped__(rows))
