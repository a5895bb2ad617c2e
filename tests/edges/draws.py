"""Random numbers that are not torch's: a step that draws them is refused, with the line."""

import random

import numpy as np
import torch
from rows import row
from torch import nn

import pfeife


def run(scale, by_name: bool = False) -> None:
    """Two calls of a step that multiplies with what is drawn; what refuses it names this file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def step(x):
        return (model(x) * scale()).square().mean()

    options = {"microbatches": 2}
    compiled = pfeife.compile(step, **options)
    if by_name:
        compiled = torch.compile(step, backend="pfeife", options=options, dynamic=True)
    for _ in range(2):
        compiled(torch.randn(4, 8)).backward()


FIRST = f'File "{__file__}", line '


@row(FIRST)
def of_pythons_generator():
    run(lambda: random.uniform(0, 1))


@row(FIRST)
def of_pythons_generator_by_name():
    run(lambda: random.uniform(0, 1), by_name=True)


@row(FIRST)
def of_a_generator_of_its_own():
    mine = random.Random(3)
    run(lambda: mine.random())


@row(FIRST)
def an_array_of_numpys():
    run(lambda: torch.as_tensor(np.random.rand(1)))


@row("the step could not be captured as one graph")
def a_number_of_numpys():
    run(lambda: np.random.normal())


@row(whole=(1,))
def draws_without_gradients_or_under_autocast():
    """The first call is not checked, and that it ends in between leaves no mode behind."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def step(x):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            noise = torch.rand(x.shape) @ x.new_ones(8, 8)
        return model(x + noise).square().mean()

    for door in ("dynamo", "trace"):
        compiled = pfeife.compile(step, microbatches=2, stages=2, capture=door)
        assert compiled(torch.randn(4, 8)).requires_grad
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


@row()
def dropout_in_a_traced_step():
    """Both doors draw alike, and the check of a trace has the expected gradients in both runs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1))
    x, found = torch.randn(4, 8), []
    for door in ("dynamo", "trace"):
        step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=2, capture=door)
        torch.manual_seed(1)
        model.zero_grad()
        loss = step(x)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert all(map(torch.equal, *found))
