"""Ranks that are threads of one process."""

import time

import pytest
import torch
from programs import CPU_CORE, clusters, for_ranks
from torch import nn

import pfeife
from pfeife.compilers import compile_bodies
from pfeife.cost import estimate
from pfeife.ir.parts import Reduction
from pfeife.lowering.buckets import Bucket
from pfeife.runtime import LocalPipeline
from pfeife.runtime.local.pipeline import LocalTransport, LocalWorld
from pfeife.testing import assert_same


def in_double(graph, examples):
    """A compiler that has another opinion about dtypes."""
    return lambda *args: [value.double() for value in graph(*args)]


def test_a_value_of_another_dtype_than_captured_is_not_sent():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    microbatches = [(torch.randn(2, 3),) for _ in range(2)]
    program = pfeife.capture(lambda x: model(x).square().sum(), *microbatches[0])
    fused = clusters(program)
    plan = pfeife.sched.plan(fused, machine=CPU_CORE, microbatches=2, stages=2)
    sent, schedule = for_ranks(fused, plan)
    pipeline = LocalPipeline(sent, schedule, bodies=compile_bodies(sent, in_double))
    with pytest.raises(ValueError, match=r"a value of torch\.float64"):
        pipeline(pfeife.state_of(program, model), microbatches)


def test_a_pipeline_of_one_rank():
    model = nn.Linear(3, 3)
    microbatches = [(torch.randn(2, 3),) for _ in range(2)]
    program = pfeife.capture(lambda x: model(x).square().sum(), *microbatches[0])
    fused, state = clusters(program), pfeife.state_of(program, model)
    plan = pfeife.sched.plan(fused, machine=CPU_CORE, microbatches=2, stages=1)
    found = LocalPipeline(*for_ranks(fused, plan))(state, microbatches)
    assert_same(pfeife.evaluate(program, state, microbatches), found)


def test_a_reduction_ends_when_the_last_rank_has_come():
    """Not when somebody waits for it."""
    bucket = Bucket((Reduction("w", (0, 1), (0, 1)),), ((2,),), torch.float32)
    world = LocalWorld()
    ranks = [LocalTransport(world, rank, 0, None) for rank in range(2)]
    begun = [one.reduce(bucket, [torch.ones(2)]) for one in ranks]
    done = time.perf_counter()
    assert all(torch.equal(one.wait()["w"], torch.full((2,), 2.0)) for one in begun)
    assert 0 < begun[0].ended == begun[1].ended <= done


class Shared(nn.Module):
    """One layer between others, which each stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.own = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.own:
            x = torch.tanh(layer(self.shared(x)))
        return x.square().mean()


@pytest.mark.parametrize(("schedule", "ranks"), [("zb-v", 2), ("interleaved", 2), ("1f1b", 4)])
def test_stages_of_a_rank_add_up_first(schedule: str, ranks: int) -> None:
    """A weight that all stages share has the bits of `evaluate`, several stages a rank or one."""
    torch.manual_seed(0)
    model, microbatches = Shared(), [torch.randn(3, 8) for _ in range(4)]
    flat = pfeife.capture(lambda x: model(x), microbatches[0])
    fused = pfeife.split_backward()(pfeife.fuse()(flat))
    fused = pfeife.annotate(estimate(fused, CPU_CORE))(fused)
    plan = pfeife.sched.plan(
        fused, machine=CPU_CORE, microbatches=4, stages=4, ranks=ranks, schedule=schedule
    )
    sent, lowered = for_ranks(fused, plan)
    state = pfeife.state_of(sent, model)
    expected = pfeife.evaluate(sent, state, microbatches)
    assert len([p for p in sent.ports(pfeife.Role.GRADIENT) if p.fqn == "shared.weight"]) > 2
    assert_same(LocalPipeline(sent, lowered)(state, microbatches), expected)
