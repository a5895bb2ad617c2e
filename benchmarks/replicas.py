"""Pipelines side by side: what of their reductions is hidden, and what each rank holds.

    python benchmarks/replicas.py [--sleep 0.02] [--repeats 7]

Four Gloo ranks. Time: layers that sleep, with weights of 1 MB, so that two cores stand for four
machines (`virtual.py`), and links between replicas that take their time, 50 MB a second; a step
with its reductions after all that a rank computes, and one with each begun at its stage's last
weight gradient, in turn, and what is predicted of both; the ideal is a step without any. Bytes: a
GPT with AdamW, what every rank is said to hold and does, if gradients are averaged and if they are
shared out.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import harness
import models
import torch
import torch.distributed as dist
import virtual
from torch import nn

import pfeife
from pfeife import report, sched
from pfeife.cost import estimate, machine, memory_curves
from pfeife.lowering.buckets import buckets_of
from pfeife.runtime.distributed.links.reducing import Reducer
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.profile import profile_memory
from pfeife.runtime.results import trained_on

ROWS = 1024  # of a layer's weight: 1 MB
VIRTUAL = pfeife.Machine(  # whose links are slow, and keep no rank from computing
    "virtual", flops=1e12, memory=2**34, memory_bandwidth=1e12, link_bandwidth=5e7, overlap=1.0
)
# How many ranks a pipeline has, its stages, the family, microbatches of each pipeline.
SHAPES = ((1, 6, "gpipe", 2), (2, 8, "interleaved", 4), (2, 4, "zb-v", 4))


class Link(Reducer):
    """A rank's link to the other replicas: what it carries, which it really does, takes as long as
    on the virtual machine's."""

    def __init__(self, seconds: float):
        super().__init__(harness.DEVICE)
        self.seconds = seconds

    def begin(self, job: Callable[[], object]) -> Any:
        def carry() -> None:
            start = time.perf_counter()
            job()
            time.sleep(max(0.0, start + self.seconds - time.perf_counter()))

        return super().begin(carry)


@attrs.frozen(eq=False)
class Side:
    """Something to time: a pipeline and its schedule."""

    program: pfeife.Program
    schedule: pfeife.Schedule
    pipeline: DistributedPipeline

    def __call__(self, state: dict, batch: list) -> None:
        self.pipeline.start(state, batch).run()

    def predicted(self, link: float = 1.0) -> float:
        """Seconds of a step, on links that are so much faster."""
        faster = attrs.evolve(VIRTUAL, link_bandwidth=link * VIRTUAL.link_bandwidth)
        return sched.predict(self.program, self.schedule, faster).seconds


def sides(
    ranks: int, stages: int, family: str, count: int, how: str
) -> tuple[dict[str, Side], dict, list]:
    """Without and with overlap."""
    torch.manual_seed(0)
    model = nn.Sequential(*(virtual.Layer(rows=ROWS) for _ in range(stages)))
    flat = pfeife.capture(
        lambda x: virtual.OPS.mean_square(model(x)),
        torch.rand(4, virtual.WIDTH),
        loss_reduction="mean",
    )
    clusters, made = pfeife.fuse()(flat), sched.families.policy(family)
    if made.splits:
        clusters = pfeife.split_backward()(clusters)
    order = made(stages, count, made.placement(stages, ranks))
    plan = pfeife.Plan(tuple(range(stages)), order)
    mesh = pfeife.Mesh(ranks, dist.get_world_size() // ranks)
    replicas = pfeife.dp_wrap(mesh, pfeife.Replicas(mesh.replicas, how))
    passes = [pfeife.partition(plan), pfeife.insert_send_recv(), replicas]
    program = pfeife.compose(*passes)(clusters)
    program = pfeife.annotate(sleeping(program))(program)
    found = {}
    for name, overlap in (("after", False), ("beside", True)):
        schedule = sched.verify_schedule(sched.lower(order, program, overlap=overlap))
        found[name] = Side(program, schedule, DistributedPipeline(program, schedule, mesh=mesh))
    (seconds,) = {bucket.seconds(VIRTUAL) for bucket in buckets_of(program)}
    harness.everyone().reducer = Link(seconds)
    batch = [(torch.rand(4, virtual.WIDTH),) for _ in range(count * mesh.replicas)]
    return found, pfeife.state_of(program, model), batch


def sleeping(program: pfeife.Program) -> pfeife.Costs:
    """What the calls of a program sleep, by what an operation does on all ranks at rest."""
    unit = torch.tensor(virtual.seconds_alone(4), dtype=torch.float64)
    dist.all_reduce(unit)
    each = float(unit) / dist.get_world_size()
    units = {call.node: virtual.units(program.body(call)) for call in program.calls}
    return pfeife.Costs("sleeping", {node: each * count for node, count in units.items()})


def times(arguments: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """A row for each shape and way."""
    for ranks, stages, family, count in SHAPES:
        for how in ("average", "shard"):
            found, state, batch = sides(ranks, stages, family, count, how)
            taken: dict[str, list[float]] = {side: [] for side in found}
            for turn in range(arguments.repeats + 1):
                for side, one in found.items():
                    seconds, _ = harness.timed(partial(one, state, batch))
                    taken[side] += [seconds] * (turn > 0)
            yield (
                f"{4 // ranks} x {ranks} ranks, {stages} stages, {family}",
                how,
                f"{1e3 * harness.everyone().reducer.seconds:.0f}",
                *(
                    f"{1e3 * statistics.median(taken[side]):.0f} ({1e3 * one.predicted():.0f})"
                    for side, one in found.items()
                ),
                f"{1e3 * found['beside'].predicted(1e6):.0f}",
            )


def stepped(gradients: dict, state: dict) -> torch.optim.Optimizer:
    """An AdamW of what this rank trains, after a step."""
    mine = [nn.Parameter(state[name].clone()) for name in gradients]
    for parameter, gradient in zip(mine, gradients.values(), strict=True):
        parameter.grad = gradient
    optimizer = torch.optim.AdamW(mine)
    optimizer.step()
    return optimizer


def held() -> Iterator[tuple[str, ...]]:
    """A row for each way and rank."""
    torch.manual_seed(0)
    case, ranks, count = models.gpt(8), 2, 2
    batch = [case.draw() for _ in range(2 * count)]
    core = machine("cpu-core")
    clusters = pfeife.fuse()(pfeife.capture(case.step, *batch[0]))
    clusters = pfeife.annotate(estimate(clusters, core))(clusters)
    plan = sched.plan(clusters, machine=core, microbatches=count, stages=ranks)
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(clusters)
    mesh = pfeife.Mesh(ranks, 2)
    for how in ("average", "shard"):
        program = pfeife.dp_wrap(mesh, pfeife.Replicas(2, how))(sent)
        schedule = sched.verify_schedule(sched.lower(plan.schedule, program))
        pipeline = DistributedPipeline(program, schedule, mesh=mesh)
        state = pfeife.state_of(program, case.model)
        gradients = pipeline(state, batch).gradients
        optimizer = stepped(gradients, state)
        sizes = {port.fqn: port.bytes for port in program.ports(pfeife.Role.GRADIENT)}
        kept = sum({one.data_ptr(): one.nbytes for one in gradients.values()}.values())
        found_kept = [int(text) for text in harness.everyone().from_all_ranks(str(kept))]
        for replica in range(mesh.replicas):
            given = {"optimizer": torch.optim.AdamW, "replica": replica}
            said = memory_curves(program, schedule, **given)
            found = profile_memory(pipeline, state, batch, optimizer=optimizer, replica=replica)
            for one, other in zip(said, found, strict=True):
                rank = mesh.in_world(replica, one.rank)
                trained = sum(sizes[name] for name in trained_on(program, one.rank, replica))
                yield (
                    how,
                    str(rank),
                    report.size(one.held["parameters"]),
                    *(report.size(curve.held["optimizer"]) for curve in (one, other)),
                    *(report.size(size) for size in (trained, found_kept[rank])),
                    *(f"{curve.peak:,}" for curve in (one, other)),
                )


def main() -> None:
    arguments = parsed()
    virtual.Device.seconds = arguments.sleep
    slept, bytes_ = list(times(arguments)), list(held())
    if dist.get_rank() == 0:
        heads = ("step in ms (predicted)", "of", "a reduction", "after", "beside", "ideal")
        print(report.table(slept, heads))
        said = ("optimizer", "found", "gradients", "found", "peak", "found")
        print(report.table(bytes_, ("GPT, AdamW", "rank", "parameters", *said)))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sleep", type=float, default=0.02, help="seconds of an operation")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--default-malloc", action="store_true", help="glibc's malloc as it is")
    return parser.parse_args(sys.argv[1:])


if __name__ == "__main__":
    parsed()
    harness.run(__file__, main, 4)
