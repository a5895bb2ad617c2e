"""Pipelines side by side: what of their reductions is hidden, and what each rank holds.

    python benchmarks/replicas.py [--sleep 0.02] [--repeats 7]

Four Gloo ranks. Time: layers that sleep, with weights of some MB, so that two cores stand for four
machines (`virtual.py`); a step with its reductions after all that a rank computes, and one with
each begun at its stage's last weight gradient, in turn. Both are simulated with what a reduction
takes at rest; the ideal is a step without any. Bytes: a GPT with
AdamW, what every rank is said to hold and does, if gradients are averaged and if they are shared
out.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial

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
from pfeife.data.schedule import Do
from pfeife.lowering.buckets import buckets_of
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.profile import profile_memory
from pfeife.runtime.results import trained_on

ROWS = 3072  # of a layer's weight, in KB
# A name, how many ranks a pipeline has, its stages, the family, microbatches of each pipeline.
SHAPES = (
    ("4 replicas of 1 rank", 1, 6, "gpipe", 2),
    ("2 replicas of 2 ranks", 2, 8, "interleaved", 4),
    ("2 replicas of 2 ranks", 2, 4, "zb-v", 4),
)


@attrs.frozen(eq=False)
class Side:
    """Something to time: a pipeline, its schedule and program."""

    program: pfeife.Program
    schedule: pfeife.Schedule
    pipeline: DistributedPipeline

    def __call__(self, state: dict, batch: list) -> None:
        self.pipeline.start(state, batch).run()


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
    passes = [pfeife.partition(plan), pfeife.insert_send_recv(), pfeife.dp_wrap(mesh, how)]
    program = pfeife.compose(*passes)(clusters)
    found = {}
    for name, overlap in (("after", False), ("beside", True)):
        schedule = sched.verify_schedule(sched.lower(order, program, overlap=overlap))
        found[name] = Side(program, schedule, DistributedPipeline(program, schedule, mesh=mesh))
    batch = [(torch.rand(4, virtual.WIDTH),) for _ in range(count * mesh.replicas)]
    return found, pfeife.state_of(program, model), batch


def reducing_seconds(side: Side, repeats: int) -> float:
    """What one bucket takes when nothing else runs, by the median of all ranks."""
    transport = side.pipeline.transport
    (bucket, *_) = [b for b in buckets_of(side.program) if transport.rank in b.first.ranks]
    parts = [torch.zeros(shape) for shape in bucket.shapes]
    times = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        transport.reduce(bucket, parts).wait()
        times.append(time.perf_counter() - start)
    found = torch.tensor(statistics.median(times[1:]), dtype=torch.float64)
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


def predicted(side: Side, unit: float, reducing: float) -> float:
    """Seconds of a step whose operations sleep and whose reductions take so long."""
    program = side.program
    sleeps = {(c.unit, c.kind): virtual.units(program.body(c)) for c in program.calls}

    def seconds(action: pfeife.Action) -> float:
        if action.do == Do.REDUCE_GRAD:
            return reducing
        mine = (sleeps[s, k] for s, k in sleeps if s == action.stage and action.runs(k))
        return unit * sum(mine) if action.do.kind else 0.0

    return sched.simulate(side.schedule, seconds).seconds


def times(arguments: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """A row for each shape and way."""
    for name, ranks, stages, family, count in SHAPES:
        for how in ("average", "shard"):
            found, state, batch = sides(ranks, stages, family, count, how)
            taken: dict[str, list[float]] = {side: [] for side in found}
            for turn in range(arguments.repeats + 1):
                for side, one in found.items():
                    seconds, _ = harness.timed(partial(one, state, batch))
                    taken[side] += [seconds] * (turn > 0)
            unit = torch.tensor(virtual.seconds_alone(4), dtype=torch.float64)
            dist.all_reduce(unit)
            unit = float(unit) / dist.get_world_size()
            reducing = reducing_seconds(found["beside"], 2 * arguments.repeats)
            said = {side: predicted(one, unit, reducing) for side, one in found.items()}
            ideal = predicted(found["beside"], unit, 0.0)
            shown = [f"{1e3 * statistics.median(taken[side]):.0f}" for side in found]
            yield (
                f"{name}, {stages} stages, {family}",
                how,
                f"{1e3 * reducing:.1f}",
                *(
                    f"{one} ({1e3 * said[side]:.0f})"
                    for side, one in zip(found, shown, strict=True)
                ),
                f"{1e3 * ideal:.0f}",
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
        program = pfeife.dp_wrap(mesh, how)(sent)
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
        heads = ("step in ms (simulated)", "of", "a reduction", "after", "beside", "ideal")
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
