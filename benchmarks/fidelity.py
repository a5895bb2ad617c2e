"""Predicted against measured: step time and peak bytes of two Gloo ranks on this machine.

    python benchmarks/fidelity.py

Each configuration is planned from costs that are measured cluster by cluster (and messages by
`bench_network`); then it runs, one step of every configuration in turn. Between the rounds the
clusters are measured again, and what is predicted goes by the medians of all rounds: the machine
may be a fifth faster in one minute than in the next. What the costs gave by which it was planned,
measured before all steps, is printed too.
"""

import random
import statistics
import time

import attrs
import models
import torch
import torch.distributed as dist
from harness import Ready, in_turn, mean_costs, of_rank_zero, one_of_all, ready, run
from scipy.stats import spearmanr

import pfeife
from pfeife import report, sched
from pfeife.cost import estimate, machine, measure, memory_curves
from pfeife.cost.network import bench_network
from pfeife.data.network import Network
from pfeife.ir.program import Program
from pfeife.runtime.profile import profile_memory

HOST = attrs.evolve(machine("cpu-core"), action_seconds=2e-5)
CASES = (models.gpt, models.skip_net, models.large_head)
SCHEDULES, MICROBATCHES = ("gpipe", "1f1b"), (2, 4, 8)


@attrs.frozen(eq=False)
class Configuration:
    """What is run: a plan for a case's clusters."""

    name: str
    schedule: str
    plan: pfeife.Plan
    ready: Ready


def clusters_of_cases() -> dict[str, tuple[models.Case, Program]]:
    found = {}
    for make in CASES:
        torch.manual_seed(0)
        case = make()
        found[case.name] = case, pfeife.fuse()(pfeife.capture(case.step, *case.draw()))
    return found


def configurations(case: models.Case, clusters: Program, repeats: int) -> list[Configuration]:
    annotated = pfeife.annotate(mean_costs(measure(clusters, repeats=repeats)))(clusters)
    found = []
    for name in SCHEDULES:
        for count in MICROBATCHES:
            plan = of_rank_zero(
                sched.plan(annotated, machine=HOST, microbatches=count, stages=2, schedule=name)
            )
            one = ready(plan, annotated, case)
            found.append(Configuration(case.name, name, plan, one))
    return found


def of_ranks(plan: pfeife.Plan, clusters: Program, costs: pfeife.Costs) -> Program:
    """The ranks' program by a plan, with other costs than those by which it was made."""
    annotated = pfeife.annotate(costs)(clusters)
    return pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(annotated)


def predicted(ranks: Program, one: Configuration, network: Network) -> float:
    """Seconds of a step by the costs of a program."""
    return sched.predict(ranks, one.ready.schedule, HOST, network).seconds


def random_plan(units: int, draw: random.Random) -> pfeife.Plan:
    """Two to four stages of random sizes on two ranks, four microbatches."""
    stages = draw.randint(2, 4)
    cuts = sorted(draw.sample(range(1, units), stages - 1))
    stage_of = tuple(sum(cut <= unit for cut in cuts) for unit in range(units))
    order = draw.choice([sched.families.gpipe, sched.families.one_f_one_b])
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
    network, cases = bench_network(), clusters_of_cases()
    planned = [one for parts in cases.values() for one in configurations(*parts, repeats)]
    found: dict[str, list[pfeife.Costs]] = {name: [] for name in cases}
    times: list[list[float]] = [[] for _ in planned]
    for _ in range(repeats):
        for name, (_, clusters) in cases.items():
            found[name].append(mean_costs(measure(clusters, repeats=3)))
        for all_taken, taken in zip(times, in_turn([p.ready for p in planned], 1), strict=True):
            all_taken += taken
    costs = {name: one_of_all(several, statistics.median) for name, several in found.items()}
    rows, time_errors, early_errors, memory_errors = [], [], [], []
    for one, taken in zip(planned, times, strict=True):
        ranks = of_ranks(one.plan, cases[one.name][1], costs[one.name])
        seconds = predicted(ranks, one, network)
        measured = statistics.median(taken)
        low, _, high = statistics.quantiles(taken, n=4)
        peaks = [curve.peak for curve in memory_curves(one.ready.program, one.ready.schedule)]
        curves = profile_memory(one.ready.pipeline, one.ready.state, one.ready.batch)
        ratios = [peak / curve.peak for peak, curve in zip(peaks, curves, strict=True)]
        time_errors.append(abs(seconds / measured - 1))
        early_errors.append(abs(predicted(one.ready.program, one, network) / measured - 1))
        memory_errors += [abs(ratio - 1) for ratio in ratios]
        rows.append(
            (
                one.name,
                one.schedule,
                one.plan.schedule.microbatches,
                f"{1e3 * seconds:.1f} ms",
                f"{1e3 * measured:.1f} ms",
                f"{1e3 * (high - low):.1f} ms",
                f"{seconds / measured:.3f}",
                " ".join(report.size(peak) for peak in peaks),
                " ".join(f"{ratio:.3f}" for ratio in ratios),
            )
        )
    if dist.get_rank() == 0:
        head = ("model", "schedule", "microbatches", "predicted", "measured", "spread", "ratio")
        print(report.table(rows, (*head, "peak bytes of ranks", "ratios")))
        for what, errors in (
            ("step time", time_errors),
            ("step time by costs measured before all steps", early_errors),
            ("peak bytes", memory_errors),
        ):
            print(
                f"{what}: median error {100 * statistics.median(errors):.1f} %, "
                f"worst {100 * max(errors):.1f} % of {len(errors)}"
            )


if __name__ == "__main__":
    run(__file__, main)
