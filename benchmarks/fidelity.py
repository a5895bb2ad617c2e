"""Predicted against measured: step time and peak bytes of two Gloo ranks on this machine.

    python benchmarks/fidelity.py

Each configuration is planned from costs that are measured cluster by cluster (and messages by
`bench_network`); then it runs, one step of every configuration in turn.
"""

import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import models
import torch
import torch.distributed as dist
from scipy.stats import spearmanr

import pfeife
from pfeife import plain, report, sched
from pfeife.cost import estimate, machine, measure, memory_curves
from pfeife.cost.network import bench_network
from pfeife.runtime.distributed import (
    DistributedPipeline,
    from_all_ranks,
    from_rank_zero,
    join_world,
    leave_world,
)
from pfeife.runtime.profile import profile_memory

DEVICE = torch.device("cpu")
CASES = (models.gpt, models.skip_net, models.large_head)
SCHEDULES, MICROBATCHES = ("gpipe", "1f1b"), (2, 4, 8)


@attrs.frozen(eq=False)
class Configuration:
    """What is run, and what was predicted of it."""

    name: str
    schedule: str
    microbatches: int
    pipeline: DistributedPipeline
    state: Any
    batch: list
    seconds: float
    peaks: tuple[int, ...]


def median_costs(costs: pfeife.Costs) -> pfeife.Costs:
    """The mean of what the ranks have measured, the same on all of them."""
    texts = from_all_ranks(plain.to_json(costs), DEVICE)
    found = [plain.from_json(pfeife.Costs, text) for text in texts]

    def mean(field: str) -> dict[str, float]:
        parts = [getattr(one, field) for one in found]
        return {name: statistics.fmean(part[name] for part in parts) for name in parts[0]}

    return attrs.evolve(costs, seconds=mean("seconds"), accumulate=mean("accumulate"))


def configurations(repeats: int) -> list[Configuration]:
    host = attrs.evolve(machine("cpu-core"), action_seconds=2e-5)
    network = bench_network()
    found = []
    for make in CASES:
        torch.manual_seed(0)
        case = make()
        program = pfeife.capture(case.step, *case.draw())
        state = pfeife.state_of(program, case.model)
        clusters = pfeife.fuse()(program)
        clusters = pfeife.annotate(median_costs(measure(clusters, repeats=repeats)))(clusters)
        for name in SCHEDULES:
            for count in MICROBATCHES:
                plan = sched.plan(
                    clusters, machine=host, microbatches=count, stages=2, schedule=name
                )
                plan = plain.from_json(pfeife.Plan, from_rank_zero(plain.to_json(plan), DEVICE))
                ranks = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(clusters)
                schedule = sched.verify_schedule(sched.lower(plan.schedule, ranks))
                found.append(
                    Configuration(
                        case.name,
                        name,
                        count,
                        DistributedPipeline(ranks, schedule, DEVICE),
                        state,
                        [case.draw() for _ in range(count)],
                        sched.predict(ranks, schedule, host, network).seconds,
                        tuple(curve.peak for curve in memory_curves(ranks, schedule)),
                    )
                )
    return found


def steps(one: Configuration) -> list[float]:
    """Seconds of two steps of the slower rank, after one that nobody times."""
    found = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        one.pipeline.start(one.state, one.batch).run()
        taken = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        found.append(float(taken))
    return found[1:]


def random_plan(units: int, draw: random.Random) -> pfeife.Plan:
    """Two to four stages of random sizes on two ranks, four microbatches."""
    stages = draw.randint(2, 4)
    cuts = sorted(draw.sample(range(1, units), stages - 1))
    stage_of = tuple(sum(cut <= unit for cut in cuts) for unit in range(units))
    order = draw.choice([sched.gpipe, sched.one_f_one_b])
    return pfeife.Plan(stage_of, order(stages, 4, tuple(s % 2 for s in range(stages))))


def rank_correlation(plans: int = 20, repeats: int = 3) -> None:
    """Of the steps that the roofline estimates and those that are measured, over random plans."""
    torch.manual_seed(0)
    case, host = models.gpt(), machine("cpu-core")
    program = pfeife.capture(case.step, *case.draw())
    state = pfeife.state_of(program, case.model)
    clusters = pfeife.fuse()(program)
    clusters = pfeife.annotate(estimate(clusters, host))(clusters)
    draw = random.Random(0)
    ready = []
    for _ in range(plans):
        plan = random_plan(clusters.units, draw)
        ranks = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(clusters)
        schedule = sched.verify_schedule(sched.lower(plan.schedule, ranks))
        pipeline = DistributedPipeline(ranks, schedule, DEVICE)
        seconds = sched.predict(ranks, schedule, host).seconds
        batch = [case.draw() for _ in range(4)]
        ready.append(Configuration("GPT", "", 4, pipeline, state, batch, seconds, ()))
    times: list[list[float]] = [[] for _ in ready]
    for _ in range(repeats):
        for one, taken in zip(ready, times, strict=True):
            taken += steps(one)
    if dist.get_rank() == 0:
        measured = [statistics.median(taken) for taken in times]
        found = spearmanr([one.seconds for one in ready], measured).statistic
        print(
            f"{plans} random plans of a GPT, estimated without running anything: "
            f"{1e3 * min(measured):.0f} to {1e3 * max(measured):.0f} ms a step, "
            f"rank correlation of estimated and measured {found:.3f}"
        )


def deep_model(depth: int = 48) -> None:
    """How many bodies of a deep GPT are measured."""
    case = models.gpt(depth=depth, width=64)
    clusters = pfeife.fuse()(pfeife.capture(case.step, *case.draw()))
    runs: list[tuple[int, int]] = []
    start = time.perf_counter()
    measure(clusters, repeats=5, progress=lambda *counts: runs.append(counts))
    if dist.get_rank() == 0:
        print(
            f"{depth} layers: {len(clusters.calls)} calls, {runs[-1][1] // 6} distinct bodies "
            f"measured, 6 runs each, in {time.perf_counter() - start:.1f} s"
        )


def main(repeats: int = 9) -> None:
    torch.set_num_threads(1)
    join_world(DEVICE)
    deep_model()
    rank_correlation()
    ready = configurations(repeats)
    times: list[list[float]] = [[] for _ in ready]
    for _ in range(repeats):
        for one, taken in zip(ready, times, strict=True):
            taken += steps(one)
    memory = [profile_memory(one.pipeline, one.state, one.batch) for one in ready]
    rows, time_errors, memory_errors = [], [], []
    for one, taken, curves in zip(ready, times, memory, strict=True):
        measured = statistics.median(taken)
        low, _, high = statistics.quantiles(taken, n=4)
        ratios = [peak / curve.peak for peak, curve in zip(one.peaks, curves, strict=True)]
        time_errors.append(abs(one.seconds / measured - 1))
        memory_errors += [abs(ratio - 1) for ratio in ratios]
        rows.append(
            (
                one.name,
                one.schedule,
                one.microbatches,
                f"{1e3 * one.seconds:.1f} ms",
                f"{1e3 * measured:.1f} ms",
                f"{1e3 * (high - low):.1f} ms",
                f"{one.seconds / measured:.3f}",
                " ".join(report.size(peak) for peak in one.peaks),
                " ".join(f"{ratio:.3f}" for ratio in ratios),
            )
        )
    if dist.get_rank() == 0:
        head = ("model", "schedule", "microbatches", "predicted", "measured", "spread", "ratio")
        print(report.table(rows, (*head, "peak bytes of ranks", "ratios")))
        for what, errors in (("step time", time_errors), ("peak bytes", memory_errors)):
            print(
                f"{what}: median error {100 * statistics.median(errors):.1f} %, "
                f"worst {100 * max(errors):.1f} % of {len(errors)}"
            )
    dist.barrier()
    leave_world()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        os.environ["OMP_NUM_THREADS"] = "1"
        os.execv(sys.executable, [*launch, "--nproc-per-node", "2", str(Path(__file__))])
