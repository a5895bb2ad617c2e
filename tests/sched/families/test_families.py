"""Every schedule of every family, and what a search finds, on the in-process runtime: the same
bits as gradient accumulation."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from share import random_cases
from torch import nn

import pfeife
from pfeife import sched
from pfeife.ir.program import Program
from pfeife.lowering.problem import Problem, StageCosts, chain_edges
from pfeife.runtime import LocalPipeline
from pfeife.sched.families.policies import POLICIES, placement
from pfeife.sched.search.search import search_schedule
from pfeife.testing import assert_same, eager_accumulation

LAYERS = 9


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[0](x).tanh()
        for layer in self.layers[1:]:
            x = layer(x).tanh()
        return x + first  # over all stages


@functools.cache
def chained() -> tuple[Chain, Program]:
    torch.manual_seed(0)
    model = Chain()
    program = pfeife.capture(lambda x: model(x).square().mean(), torch.randn(2, 3))
    return model, pfeife.split_backward()(pfeife.fuse()(program))


def check_runs(order: pfeife.Schedule) -> None:
    """Evenly cut into the schedule's stages, every rank a thread."""
    model, clusters = chained()
    stages, count = order.stages, order.microbatches
    stage_of = tuple(unit * stages // clusters.units for unit in range(clusters.units))
    plan = pfeife.Plan(stage_of, order)
    ranks = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(clusters)
    schedule = sched.verify_schedule(sched.lower(order, ranks))
    torch.manual_seed(count)
    batch = [(torch.randn(2, 3),) for _ in range(count)]
    found = LocalPipeline(ranks, schedule)(pfeife.state_of(clusters, model), batch)
    expected = eager_accumulation(lambda x: model(x).square().mean(), model, batch)
    assert_same(expected, found)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(data=st.data())
@random_cases(24)
def test_a_family(name, data):
    ranks = data.draw(st.integers(1, 4), "ranks")
    stages = data.draw(st.integers(ranks, min(2 * ranks, 8)), "stages")
    if name in ("zb-v", "v-half", "v-min", "dualpipe-v"):
        stages = 2 * ranks
    microbatches = data.draw(st.integers(1, 9), "microbatches")
    stage_ranks = placement(name, stages, ranks)
    check_runs(POLICIES[name](stages, microbatches, stage_ranks))


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_what_a_search_finds(data):
    """Over random times and memory, on any placement."""
    ranks = data.draw(st.integers(1, 4), "ranks")
    stages = data.draw(st.integers(ranks, min(2 * ranks, 6)), "stages")
    stage_ranks = data.draw(st.permutations([s % ranks for s in range(stages)]), "stage_ranks")
    seconds = st.floats(0.1, 3.0)
    costs = tuple(
        StageCosts(data.draw(seconds), data.draw(seconds), data.draw(seconds), 2.0, 1.0)
        for _ in range(stages)
    )
    count = data.draw(st.integers(1, 6), "microbatches")
    room = data.draw(st.integers(1, count), "room") * 2.0 * stages
    problem = Problem(
        costs, tuple(stage_ranks), count, chain_edges(stages, data.draw(seconds)), (room,) * ranks
    )
    check_runs(search_schedule(problem, work=20_000, seconds=60.0).schedule)
