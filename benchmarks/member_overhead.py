"""Tensor parallelism on two ranks: ours beside torch's `parallelize_module` and a loop by hand.

    python benchmarks/member_overhead.py [--rounds 30]

Blocks of two layers, the first cut by columns and the second by rows, on Gloo; a step is four
microbatches, forward and backward, and SGD. The loop by hand calls nothing but torch's collectives
where Megatron would: what it takes no runtime can undercut. The sides take turns, step by step, and
agree in their losses. A step's time is that of the slower rank.

`pipeline` is our step without `pfeife.compile` around it and without telling parameters: a
`DistributedPipeline` with each member's part of the parameters.
"""

import argparse
import copy
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import pfeife
from pfeife import report, sched
from pfeife.cost import estimate, machine
from pfeife.runtime.distributed.pipeline import DistributedPipeline

MICROBATCHES, MEMBERS = 4, 2
CASES = {"tiny": (8, 32, 8), "small": (8, 256, 64), "wide": (4, 1024, 64)}  # blocks, width, rows


@attrs.frozen(eq=False)
class Case:
    """A model, its batch, and how its blocks are cut."""

    model: nn.Module
    batch: torch.Tensor
    plan: dict[str, type]


def made(blocks: int, width: int, rows: int) -> Case:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        for _ in range(blocks)
    ]
    plan = {f"{at}.0": ColwiseParallel for at in range(blocks)}
    plan |= {f"{at}.2": RowwiseParallel for at in range(blocks)}
    return Case(nn.Sequential(*layers), torch.randn(MICROBATCHES * rows, width), plan)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x).square().mean()


Step = Callable[[], float]


def ours(case: Case) -> Step:
    model = copy.deepcopy(case.model)
    step = pfeife.compile(
        lambda x: loss_of(model, x),
        microbatches=MICROBATCHES,
        members=MEMBERS,
        parallel={name: style() for name, style in case.plan.items()},
        progress=False,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def run() -> float:
        optimizer.zero_grad()
        loss = step(case.batch)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return run


def pipeline(case: Case) -> Step:
    """Each member's part of the parameters, stepped by itself."""
    model, parts = copy.deepcopy(case.model), case.batch.chunk(MICROBATCHES)
    names = pfeife.placements(model, {name: style() for name, style in case.plan.items()})
    flat = pfeife.capture(lambda x: loss_of(model, x), parts[0])
    local = pfeife.compose(pfeife.shard(names, MEMBERS), pfeife.fuse())(flat)
    core = machine("cpu-core")
    local = pfeife.annotate(estimate(local, core))(local)
    plan = sched.plan(local, machine=core, microbatches=MICROBATCHES, stages=1, schedule="1f1b")
    ranks = pfeife.apply(plan)(local)
    schedule = sched.verify_schedule(sched.lower(plan.schedule, ranks))
    runner = DistributedPipeline(ranks, schedule, mesh=pfeife.Mesh(1, members=MEMBERS))
    state = pfeife.state_of(ranks, model, member=runner.mesh.member)
    microbatches = [(part,) for part in parts]

    def run() -> float:
        result = runner(state, microbatches)
        for name, gradient in result.gradients.items():
            state[name].sub_(gradient, alpha=1e-3)
        return float(result.loss)

    return run


def accumulated(case: Case, model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    parts = case.batch.chunk(MICROBATCHES)

    def run() -> float:
        optimizer.zero_grad()
        total = 0.0
        for part in parts:
            loss = loss_of(model, part) / MICROBATCHES
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        return total

    return run


def torchs(case: Case) -> Step:
    """By DTensors."""
    model = copy.deepcopy(case.model)
    mesh = init_device_mesh("cpu", (MEMBERS,))
    parallelize_module(model, mesh, {name: style() for name, style in case.plan.items()})
    return accumulated(case, model)


class Told(torch.autograd.Function):
    """What comes before a layer that is cut by columns: gradients are added up."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class Summed(torch.autograd.Function):
    """What comes after a layer that is cut by rows."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class ByHand(nn.Module):
    """A member's part of a block."""

    def __init__(self, block: nn.Sequential, member: int):
        super().__init__()

        def part(value: torch.Tensor, dim: int) -> nn.Parameter:
            return nn.Parameter(value.detach().chunk(MEMBERS, dim)[member].clone())

        self.up, self.bias = part(block[0].weight, 0), part(block[0].bias, 0)
        self.down = part(block[2].weight, 1)
        self.last = nn.Parameter(block[2].bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.gelu(nn.functional.linear(Told.apply(x), self.up, self.bias))
        return Summed.apply(nn.functional.linear(h, self.down)) + self.last


def by_hand(case: Case) -> Step:
    member = dist.get_rank()
    return accumulated(case, nn.Sequential(*(ByHand(block, member) for block in case.model)))


SIDES = {"by hand": by_hand, "torch": torchs, "pipeline": pipeline, "ours": ours}


def seconds_of(step: Step) -> float:
    """Of the slower rank."""
    dist.barrier()
    start = time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def measured(name: str, rounds: int) -> list[str]:
    case = made(*CASES[name])
    steps = {side: make(case) for side, make in SIDES.items()}
    for _ in range(3):
        losses = [step() for step in steps.values()]
        assert max(losses) - min(losses) < 1e-4 * max(losses), losses
    times: dict[str, list[float]] = {side: [] for side in steps}
    for _, (side, step) in itertools.product(range(rounds), steps.items()):
        times[side].append(seconds_of(step))
    medians = {side: statistics.median(taken) for side, taken in times.items()}
    base = medians["by hand"]
    collectives = 2 * CASES[name][0] * MICROBATCHES
    cells = [f"{1e3 * base:.2f} ms"]
    for side, taken in times.items():
        if side != "by hand":
            ratios = statistics.quantiles(
                [a / b for a, b in zip(taken, times["by hand"], strict=True)]
            )
            cells.append(f"{ratios[1]:.2f} ({ratios[0]:.2f} to {ratios[2]:.2f})")
    more = 1e6 * (medians["pipeline"] - base) / collectives
    return [name, *cells, f"{more:.0f} us"]


def on_this_rank(rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [measured(name, rounds) for name in CASES]
    head = ["case", "by hand", "torch", "pipeline", "ours", "pipeline, a collective more"]
    if dist.get_rank() == 0:
        print(report.table(rows, head))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--on-a-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on_a_rank:
        on_this_rank(arguments.rounds)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    own = [str(Path(__file__).resolve()), "--on-a-rank", "--rounds", str(arguments.rounds)]
    sys.exit(subprocess.run([*command, *own], check=False).returncode)


if __name__ == "__main__":
    main()
