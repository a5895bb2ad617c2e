"""Where to cut, as somebody asks for it: even parts, names, borders."""

import copy
import itertools

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from small import compiled, net
from torch import nn

import pfeife
from pfeife.sched.cutting.partitions import even, partitioned


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ("uniform", (0, 0, 1, 1)),
        ("parameters", (0, 0, 1, 1)),
        ("type:BLOCK", (0, 0, 1, 1)),
        ([1, 3], (0, 1, 1, 2)),
        (["blocks.1"], (0, 1, 1, 1)),
        (lambda program: [0] * 3 + [1], (0, 0, 0, 1)),
    ],
)
def test_partitions(partition, expected):
    several = len(set(expected)) > 2
    found = compiled(partition=partition, stages=None if several else 2)
    assert found.plan.stage_of_cluster == expected


def test_parameters_are_counted_by_their_elements():
    """Not by their bytes: the last two layers of six are in double precision."""
    single, double = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)
    model = nn.ModuleList(copy.deepcopy(one) for one in [single] * 4 + [double] * 2)

    def step(x):
        for layer in model:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x.mean()

    program = pfeife.fuse()(pfeife.capture(step, torch.randn(2, 4)))
    assert partitioned(program, "parameters", 2) == (0, 0, 0, 1, 1, 1)


def test_a_parameter_of_several_clusters_counts_where_it_is_used_first():
    """The last of four layers is the first one again, which has as many elements as the others."""
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def step(x):
        for layer in (*model, model[0]):
            x = layer(x).tanh()
        return x.mean()

    program = pfeife.fuse()(pfeife.capture(step, torch.randn(2, 4)))
    assert partitioned(program, "parameters", 3) == (0, 1, 2, 2)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.integers(1, 4),
    st.sets(st.integers(1, 7)),
)
def test_even_parts_are_the_best_of_all(weights, stages, borders):
    borders = sorted(border for border in borders if border < len(weights))
    every = []
    for starts in itertools.combinations(borders, stages - 1):
        edges = [0, *starts, len(weights)]
        loads = [sum(weights[a:b]) for a, b in itertools.pairwise(edges)]
        every.append((max(loads), sum(load**2 for load in loads)))
    assume(every)
    found = even(weights, borders, stages)
    loads = [sum(w for w, s in zip(weights, found, strict=True) if s == k) for k in range(stages)]
    assert (max(loads), sum(load**2 for load in loads)) == min(every)


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ("layers", "option partition='layers': must be 'parameters', 'uniform', 'type:Regex'"),
        ([1, "blocks.1"], "option partition=.*must be 'parameters'"),
        ("type:conv", r"no module has such a class; there are \['Block', 'Linear', 'Net'\]"),
        ("type:(", r"partition='type:\(': missing \)"),
        ("type:net", "2 stages, and only 0 places for a border"),
        ([3, 1], r"partition=\[3, 1\]: the clusters at which stages start go up, from 1 to 3"),
        (["blocks.9"], "no module of that name computes anything"),
        (lambda program: [0], "it returned 1 stages for 4 clusters"),
    ],
)
def test_wrong_partitions_are_refused(partition, message):
    one = net()
    with pytest.raises(ValueError, match=message):
        pfeife.compile(one.step, microbatches=4, stages=2, partition=partition)(one.batch(8))
