"""The whole stack on a screen: a step captured, cut, scheduled, run, with eager's numbers."""

import torch
from torch import nn

import pfeife
from pfeife import sched
from pfeife.cost import estimate, machine
from pfeife.runtime import LocalPipeline

CPU_CORE = machine("cpu-core")


def test_the_whole_stack():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def step(x):
        return model(x).square().mean()

    microbatches = [(torch.randn(3, 4),) for _ in range(4)]
    program = pfeife.capture(step, *microbatches[0])
    state = pfeife.state_of(program, model)

    clusters = pfeife.fuse()(program)
    clusters = pfeife.annotate(estimate(clusters, CPU_CORE))(clusters)
    plan = sched.plan(clusters, machine=CPU_CORE, microbatches=4, stages=2, schedule="1f1b")
    stages = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(clusters)
    schedule = sched.verify_schedule(sched.lower(plan.schedule, stages))
    assert schedule.to_csv().splitlines()[1].startswith("1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1")

    alone = pfeife.evaluate(program, state, microbatches)
    piped = LocalPipeline(stages, schedule)(state, microbatches)
    for microbatch in microbatches:
        (step(*microbatch) / 4).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, alone.gradients[name])
        assert torch.equal(parameter.grad, piped.gradients[name])
