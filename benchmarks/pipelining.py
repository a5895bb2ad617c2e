"""The peer: torch.distributed.pipelining, by its public interface."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from splits import Split
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

import pfeife
from pfeife import sched

_ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MORE = {"interleaved": ScheduleInterleaved1F1B, "zb-v": ScheduleZBVZeroBubble}


@attrs.frozen(eq=False)
class Peer:
    """This rank's stages and schedule, and what a step is given here."""

    schedule: Any
    arguments: tuple[torch.Tensor, ...]
    target: torch.Tensor | None
    parameters: dict[str, torch.nn.Parameter]
    losses: list[torch.Tensor]

    def reset(self) -> None:
        self.losses.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self) -> None:
        self.schedule.step(
            *self.arguments, target=self.target, losses=self.losses, return_outputs=False
        )

    def gradients(self) -> dict[str, torch.Tensor]:
        return {n: p.grad for n, p in self.parameters.items() if p.grad is not None}

    def loss(self) -> torch.Tensor | None:
        """On the rank of the last stage."""
        return torch.stack(self.losses).mean().detach() if self.losses else None


def peer(
    split: Split, name: str, batch: Sequence[tuple[torch.Tensor, ...]], inductor: bool = False
) -> Peer:
    """The same microbatches, as one batch that the schedule cuts again; with stages that
    torch.compile has compiled, if they shall be."""
    count, ranks, rank = len(split.stages), dist.get_world_size(), dist.get_rank()
    mine = [s for s, at in enumerate(sched.families.placement(name, count, ranks)) if at == rank]
    modules = [torch.compile(split.stages[s]) if inductor else split.stages[s] for s in mine]
    place = torch.device("cpu")
    stages = [PipelineStage(m, s, count, place) for m, s in zip(modules, mine, strict=True)]
    if name in _ONE_STAGE:
        schedule = _ONE_STAGE[name](stages[0], len(batch), loss_fn=split.loss)
    else:
        schedule = _MORE[name](stages, len(batch), loss_fn=split.loss)
    whole = [torch.cat(tensors) for tensors in zip(*batch, strict=True)]
    held = {id(p) for s in mine for p in split.stages[s].parameters()}
    parameters = {n: p for n, p in split.case.model.named_parameters() if id(p) in held}
    return Peer(
        schedule,
        (whole[0],) if 0 in mine else (),
        whole[-1] if count - 1 in mine else None,
        parameters,
        [],
    )


def order(one: Peer, name: str, stages: int, microbatches: int) -> pfeife.Schedule:
    """What the peer runs, as Pfeife's schedule. (Its pipeline_order is the order that is run only
    where a rank has several stages.)"""
    ranks = dist.get_world_size()
    if name in _ONE_STAGE:
        return sched.POLICIES[name](stages, microbatches, range(ranks))
    rows = [[str(a) for a in one.schedule.pipeline_order[r] if a] for r in range(ranks)]
    return pfeife.Schedule.from_csv("\n".join(map(",".join, rows))).computing()
