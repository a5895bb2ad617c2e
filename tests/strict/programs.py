"""A program for the model's ranks, with what goes between far stages and what several use."""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import nn

import pfeife
from pfeife import sched

LAYERS, WIDTH = 8, 4
Numbers = tuple[pfeife.Program, Mapping[str, torch.Tensor], list[tuple[torch.Tensor, ...]]]


class Skipping(nn.Module):
    """The first layer's values are read by two far ones; the second and the last share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.layers[-1].weight = self.layers[1].weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x
        for index, layer in enumerate(self.layers):
            x = layer(x + first if index in (4, 7) else x).tanh()
            first = x if index == 0 else first
        return x.square().mean(), x.detach()


@functools.cache
def skipping(split: bool = False, microbatches: int = 4) -> Numbers:
    """The program of clusters of such a step, its state, and microbatches."""
    torch.manual_seed(0)
    net = Skipping()
    batches = [(torch.randn(2, WIDTH),) for _ in range(microbatches)]
    program = pfeife.fuse()(pfeife.capture(net.forward, *batches[0]))
    state = pfeife.state_of(program, net)
    return pfeife.split_backward()(program) if split else program, state, batches


def on_ranks(
    schedule: pfeife.Schedule,
    replicas: int = 1,
    *,
    cuts: Sequence[int] = (),
    overlap: bool = True,
) -> tuple[pfeife.Program, pfeife.Schedule]:
    """The program for a schedule's ranks, and the schedule with its messages and reductions. The
    stages are as even as they can be, unless there are `cuts`: the last layer of each but one."""
    split = any(action.do == "W" for rank in schedule.ranks for action in rank)
    program = skipping(split)[0]
    clusters = max(call.unit for call in program.calls) + 1
    stages = schedule.stages
    stage_of = tuple(cluster * stages // clusters for cluster in range(clusters))
    if cuts:
        stage_of = tuple(sum(cluster > cut for cut in cuts) for cluster in range(clusters))
    plan = pfeife.Plan(stage_of, schedule)
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(program)
    if replicas > 1:
        sent = pfeife.dp_wrap(pfeife.Mesh(len(schedule.ranks), replicas))(sent)
    return sent, sched.verify_schedule(sched.lower(schedule, sent, overlap=overlap))
