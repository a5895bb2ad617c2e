"""A script as mypy --strict reads it (`make lint`); what is marked as an error must be one."""

from pathlib import Path
from typing import assert_type

import torch

import pfeife

net = torch.nn.Linear(4, 1)


def loss_of(rows: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    loss: torch.Tensor = net(rows).square().mean()
    return loss * scale


step = pfeife.compile(loss_of, microbatches=2, stages=2, cache=Path("kept"))
loss = assert_type(step(torch.ones(4, 4), scale=0.5), torch.Tensor)
loss.backward()  # type: ignore[no-untyped-call]
step(torch.ones(4, 4), scales=0.5)  # type: ignore[call-arg]
step("rows")  # type: ignore[arg-type]
plan: pfeife.Plan = step.backend.compiled[0].plan

pfeife.compile(loss_of, schedul="1f1b")  # type: ignore[call-arg]
pfeife.compile(loss_of, microbatches="4")  # type: ignore[arg-type]
pfeife.compile(loss_of, in_dims={"rows": 0}, batch="replica", recompute=["0"])
pfeife.compile(loss_of, batch="replicas")  # type: ignore[arg-type]
pfeife.compile(loss_of, plan=3)  # type: ignore[arg-type]
again = pfeife.compile(loss_of, microbatches=2, plan=plan, machine="h100-sxm", optimizer="adamw")


meshed = pfeife.compile(loss_of, mesh="-2,4", devices=["cpu", "cpu"], reduce={"loss": "mean"})
named = pfeife.backend(microbatches=2, accumulate="float32", schedule="search", search_work=1000)
pfeife.backend(microbatchs=2)  # type: ignore[call-arg]
