"""A program for the model's ranks, with what goes between far stages and what several use."""

import functools
from collections.abc import Mapping, Sequence
from enum import Enum

import torch
from torch import nn

import pfeife
from pfeife import sched
from pfeife.data.replicas import Replicas

LAYERS, WIDTH, ROWS = 8, 4, 6
SMALL = 100  # bytes of a bucket: a weight and a bias
Numbers = tuple[pfeife.Program, Mapping[str, torch.Tensor], list[tuple[torch.Tensor, ...]]]


class Case(Enum):
    """What a step does beside its layers."""

    TRAINING = "nothing"
    EVALUATION = "it has no backward"
    SIZED = "data decide how many rows all but the first layer have"
    COUNTED = "its loss is a mean over rows that the batch chooses"
    NORMED = "it tracks statistics of the batch of all replicas"


class Skipping(nn.Module):
    """The first layer's values are read by two far ones; the second and the last share a weight."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.layers[-1].weight = self.layers[1].weight
        self.case = case
        normed = (2, 5) if case == Case.NORMED else ()
        self.norms = nn.ModuleDict({str(index): nn.BatchNorm1d(WIDTH) for index in normed})

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = given = x
        for index, layer in enumerate(self.layers):
            x = layer(x + first if index in (4, 7) else x).tanh()
            x = self.norms[str(index)](x) if str(index) in self.norms else x
            if index == 0:
                first = x = x[x.sum(1) > 0] if self.case == Case.SIZED else x
        if self.case != Case.COUNTED:
            return x.square().mean(), x.detach()
        chosen = (given[:, 0] > 0).to(x.dtype)
        return (x.square().mean(1) * chosen).sum() / chosen.sum(), x.detach()


@functools.cache
def skipping(
    case: Case = Case.TRAINING, split: bool = False, microbatches: int = 4, members: int = 1
) -> Numbers:
    """The program of clusters of such a step, its state, and microbatches; that of one of so many
    members cuts some matrices, and the others are told."""
    torch.manual_seed(0)
    net = Skipping(case)
    batches = [(torch.randn(ROWS, WIDTH),) for _ in range(microbatches)]
    for (x,) in batches:
        x[0, 0] = 1.0  # a row that is chosen
    how = "mean" if case == Case.SIZED else "auto"
    with torch.set_grad_enabled(case != Case.EVALUATION):
        flat = pfeife.capture(net.forward, *batches[0], loss_reduction=how)
    if members > 1:
        flat = pfeife.shard({"*": "gathered", "*[135].*": "cut"}, members, keepers={})(flat)
    program = pfeife.compose(pfeife.defer_batch_norm(), pfeife.fuse())(flat)
    state = pfeife.state_of(program, net)
    return pfeife.split_backward()(program) if split else program, state, batches


def on_ranks(
    schedule: pfeife.Schedule,
    replicas: int = 1,
    *,
    case: Case = Case.TRAINING,
    cuts: Sequence[int] = (),
    overlap: bool = True,
    shard: bool = False,
    members: int = 1,
) -> tuple[pfeife.Program, pfeife.Schedule]:
    """The program for a schedule's ranks, and the schedule with its messages and reductions. The
    stages are as even as they can be, unless there are `cuts`: the last layer of each but one.
    Gradients that replicas `shard` travel in small buckets."""
    split = any(action.do == "W" for rank in schedule.ranks for action in rank)
    program = skipping(case, split, members=members)[0]
    clusters = max(call.unit for call in program.calls) + 1
    stages = schedule.stages
    stage_of = tuple(cluster * stages // clusters for cluster in range(clusters))
    if cuts:
        stage_of = tuple(sum(cluster > cut for cut in cuts) for cluster in range(clusters))
    plan = pfeife.Plan(stage_of, schedule)
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(program)
    if replicas > 1 or members > 1:
        how = Replicas(replicas, "shard", SMALL) if shard else None
        sent = pfeife.dp_wrap(pfeife.Mesh(len(schedule.ranks), replicas), how)(sent)
    return sent, sched.verify_schedule(sched.lower(schedule, sent, overlap=overlap))
