"""Which door takes a step, and what is said of it."""

import pytest
import torch
from listening import said
from torch import nn

import pfeife
from pfeife.backend.entry import backend
from pfeife.backend.step import CompiledStep


def compiled(step, **options) -> CompiledStep:
    return CompiledStep(step, 0, backend(microbatches=2, progress=False, **options))


def test_a_refusal_says_where_the_call_was():
    net = nn.Linear(4, 4)
    step = compiled(lambda x: net(x).square().mean())
    outcome = step.attempt((torch.ones(3, 4),), {}, None)
    assert outcome.at == "batch" and "does not divide" in str(outcome.error)
    outcome = step.attempt((torch.ones(4, 4),), {}, None)
    assert outcome.error is None


def test_a_step_that_dynamo_refuses_is_traced_from_then_on():
    net = nn.Linear(4, 4)

    def step(x):
        if net.weight.sum().item() > 1e9:  # a branch by data
            return x.sum()
        return net(x).square().mean()

    door = compiled(step)
    for _ in range(2):
        assert door.attempt((torch.ones(4, 4),), {}, None).error is None
    assert door.door == "trace" and door.refused is not None
    assert len(door.by_trace.known) == 1 and not door.by_dynamo.compilation.hooks


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
def test_the_door_that_is_asked_for(capture):
    net = nn.Linear(4, 4)
    door = compiled(lambda x: net(x).square().mean(), capture=capture)
    for _ in range(2):
        door((torch.ones(4, 4),), {}).backward()
    assert door.log_door.cache_info().misses == 1 and net.weight.grad is not None
    (built,) = door.backend.compiled
    assert built.captured.door == capture


def test_traces_of_other_sizes_are_dropped():
    net = nn.Linear(4, 4)
    options = {"capture": "trace", "dynamic": False, "max_programs": 2}
    door = compiled(lambda x: net(x).square().mean(), **options)
    with said() as lines:
        for rows in (4, 8, 12, 16):
            assert door.attempt((torch.ones(rows, 4),), {}, None).error is None
    assert len(door.by_trace.known) == 2
    assert sum("captured for 2 sizes" in line for line in lines) == 1
    assert len(door.backend.compiled) == 2


def test_what_is_built_is_run_by_who_is_given_it():
    """`explain` builds, and runs nothing."""
    net, given = nn.Linear(4, 4), []

    def build(steps, values, options, sent):
        given.append((len(values), options.microbatches, sent))
        raise RuntimeError("enough")

    door = CompiledStep(
        lambda x: net(x).square().mean(), 0, pfeife.backend(microbatches=2), build, runs=False
    )
    with pytest.raises(RuntimeError, match="enough"):
        door.attempt((torch.ones(4, 4),), {}, None)
    assert given == [(3, 2, None)]
