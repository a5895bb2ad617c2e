"""Predicted against measured: step time and peak bytes of two Gloo ranks on this machine.

    python benchmarks/fidelity.py

Each configuration is planned from costs that are measured cluster by cluster (and messages by
`bench_network`); then it runs, one step of every configuration in turn.
"""

import random
import statistics
import time

import attrs
import models
import torch
import torch.distributed as dist
from harness import Ready, in_turn, mean_costs, of_rank_zero, ready, run
from scipy.stats import spearmanr

import pfeife
from pfeife import report, sched
from pfeife.cost import estimate, machine, measure, memory_curves
from pfeife.cost.network import bench_network
from pfeife.runtime.profile import profile_memory

CASES = (models.gpt, models.skip_net, models.large_head)
SCHEDULES, MICROBATCHES = ("gpipe", "1f1b"), (2, 4, 8)


@attrs.frozen(eq=False)
class Configuration:
    """What is run, and what was predicted of it."""

    name: str
    schedule: str
    microbatches: int
    ready: Ready
    seconds: float
    peaks: tuple[int, ...]


def configurations(repeats: int) -> list[Configuration]:
    host = attrs.evolve(machine("cpu-core"), action_seconds=2e-5)
    network = bench_network()
    found = []
    for make in CASES:
        torch.manual_seed(0)
        case = make()
        program = pfeife.capture(case.step, *case.draw())
        clusters = pfeife.fuse()(program)
        clusters = pfeife.annotate(mean_costs(measure(clusters, repeats=3 * repeats)))(clusters)
        for name in SCHEDULES:
            for count in MICROBATCHES:
                plan = sched.plan(
                    clusters, machine=host, microbatches=count, stages=2, schedule=name
                )
                one = ready(of_rank_zero(plan), clusters, case)
                predicted = sched.predict(one.program, one.schedule, host, network).seconds
                peaks = tuple(curve.peak for curve in memory_curves(one.program, one.schedule))
                found.append(Configuration(case.name, name, count, one, predicted, peaks))
    return found


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
    clusters = pfeife.fuse()(pfeife.capture(case.step, *case.draw()))
    clusters = pfeife.annotate(estimate(clusters, host))(clusters)
    draw = random.Random(0)
    tried = [ready(random_plan(clusters.units, draw), clusters, case) for _ in range(plans)]
    predicted = [sched.predict(one.program, one.schedule, host).seconds for one in tried]
    times = in_turn(tried, repeats)
    if dist.get_rank() == 0:
        measured = [statistics.median(taken) for taken in times]
        found = spearmanr(predicted, measured).statistic
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
    deep_model()
    rank_correlation()
    planned = configurations(repeats)
    times = in_turn([one.ready for one in planned], repeats)
    memory = [
        profile_memory(one.ready.pipeline, one.ready.state, one.ready.batch) for one in planned
    ]
    rows, time_errors, memory_errors = [], [], []
    for one, taken, curves in zip(planned, times, memory, strict=True):
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


if __name__ == "__main__":
    run(__file__, main)
