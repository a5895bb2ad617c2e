"""Programs of the tests' models, at every level."""

import functools

import torch
from models import case
from torch import nn

import pfeife
from pfeife import sched
from pfeife.cost import estimate, machine
from pfeife.cost.measure import fingerprint
from pfeife.runtime import LocalPipeline

CPU_CORE = machine("cpu-core")


def clusters(program: pfeife.Program, boundaries: dict | None = None) -> pfeife.Program:
    fused = pfeife.fuse(boundaries=boundaries)(program)
    return pfeife.annotate(estimate(fused, CPU_CORE))(fused)


@functools.cache
def captured(name: str):
    one = case(name)
    microbatches = [one.batch(2, seed) for seed in range(4)]
    program = pfeife.capture(one.step, *microbatches[0])
    state = {n: v.clone() for n, v in pfeife.state_of(program, one.model).items()}
    return one, program, state, microbatches


def lowered(plan: pfeife.Plan, program: pfeife.Program) -> pfeife.Schedule:
    return sched.verify_schedule(sched.lower(plan.schedule, program))


def for_ranks(program: pfeife.Program, plan: pfeife.Plan, split: bool = False):
    """A program of clusters, partitioned and with its messages, and its schedule."""
    passes = [pfeife.split_backward()] if split else []
    sent = pfeife.compose(pfeife.partition(plan), *passes, pfeife.insert_send_recv())(program)
    return sent, lowered(plan, sent)


@functools.cache
def fused(name: str) -> pfeife.Program:
    one = case(name)
    return pfeife.fuse()(pfeife.capture(one.step, *one.batch(2)))


def distinct_bodies(program: pfeife.Program) -> int:
    return len({fingerprint(program.body(call)) for call in program.calls})


class Updating(nn.Module):
    """Two layers, and a buffer that every microbatch changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def update(self, x: torch.Tensor) -> None:
        self.scale.mul_(0.9).add_(x.detach().mean())


def small_program() -> pfeife.Program:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    return pfeife.fuse()(
        pfeife.capture(lambda x: model(x).square().sum(), torch.randn(2, 3)),
    )


@functools.cache
def annotated(name: str) -> pfeife.Program:
    return clusters(fused(name))


def pipelined(name="1f1b", stages=4, ranks=2):
    """A step of a GPT in threads of this process, with its state and three microbatches."""
    one = case("GPT")
    microbatches = [one.batch(2, seed) for seed in range(3)]
    fused = clusters(pfeife.capture(one.step, *microbatches[0]))
    plan = sched.plan(
        fused, machine=CPU_CORE, microbatches=3, stages=stages, ranks=ranks, schedule=name
    )
    sent, schedule = for_ranks(fused, plan)
    return LocalPipeline(sent, schedule), pfeife.state_of(sent, one.model), microbatches
