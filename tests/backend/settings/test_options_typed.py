"""Types of the options (`tests/typed.py` is what they tell), and what `pfeife.compile` returns."""

import copy
import functools
import pickle
import pydoc

import attrs
import pytest
import torch

import pfeife
from pfeife.backend.settings.options import Options

net = torch.nn.Linear(4, 1)


@functools.partial(pfeife.compile, microbatches=2)
def loss_of(rows):
    """The loss."""
    return net(rows).square().mean()


class Trainer:
    def loss(self, rows):
        return net(rows).square().mean()

    step = pfeife.compile(loss, microbatches=2)


def test_help_has_each_option():
    text = pydoc.render_doc(pfeife.compile, renderer=pydoc.plaintext)
    for field in attrs.fields(Options):
        assert f" {field.name}=" in text and f"    {field.name}: " in text, field.name


@pytest.mark.parametrize("of", [Options, pfeife.PipelinedStep])
def test_help_fits_on_a_screen(of):
    """60 lines of 100 letters, and it says what to look at next."""
    text = pydoc.render_doc(of, renderer=pydoc.plaintext)
    assert sum(1 + len(line) // 100 for line in text.splitlines()) <= 60
    assert all(f"`{name}`" in text for name in ("Program", "Plan", "Schedule"))


def test_what_is_shown_of_a_step_fits_on_a_screen():
    assert "not called yet" in repr(pfeife.compile(net)) and "Plan" in repr(loss_of)
    assert repr(loss_of).count("\n") < 60


def test_a_step_is_like_a_function():
    assert (loss_of.__name__, loss_of.__doc__) == ("loss_of", "The loss.")
    assert copy.deepcopy(loss_of) is loss_of and b"loss_of" in pickle.dumps(loss_of)  # by its name
    rows = torch.randn(4, 4)
    assert torch.equal(loss_of(rows), Trainer().step(rows))
    assert Trainer.step.backend.options.microbatches == 2
    inside = torch.compile(lambda: loss_of(rows), backend="eager", fullgraph=True)
    assert torch.equal(inside(), loss_of.__wrapped__(rows))
