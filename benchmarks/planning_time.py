"""How long planning takes: cuts, placement and schedule of a deep GPT, for many ranks.

    python benchmarks/planning_time.py

The time is that of `sched.plan` from the annotated clusters on; capture and fusion come before.
"""

import time

import models

import pfeife
from pfeife import report, sched
from pfeife.cost import estimate, machine

# layers, ranks, microbatches, search_seconds (20 is the default)
CASES = ((50, 8, 64, 20.0), (200, 16, 128, 20.0), (200, 64, 512, 120.0))


def clusters_of(layers: int, host: pfeife.Machine) -> pfeife.Program:
    case = models.language("GPT", models.GPT(32, layers, 100, 8), 100, 1, 8)
    program = pfeife.fuse()(pfeife.capture(case.step, *case.draw()))
    split = pfeife.split_backward()(program)
    return pfeife.annotate(estimate(split, host))(split)


def main() -> None:
    host = machine("h100-sxm")
    known: dict[int, pfeife.Program] = {}
    rows = []
    for layers, ranks, microbatches, budget in CASES:
        if layers not in known:
            known[layers] = clusters_of(layers, host)
        program = known[layers]
        start = time.perf_counter()
        plan = sched.plan(
            program,
            machine=host,
            microbatches=microbatches,
            ranks=ranks,
            schedule="search",
            search_seconds=budget,
        )
        taken = time.perf_counter() - start
        gap = 100 * (plan.step_seconds / plan.bound_seconds - 1)
        times = (f"{budget:.0f} s", f"{taken:.1f} s")
        rows.append((program.units, ranks, microbatches, *times, plan.stages, f"{gap:.2f} %"))
    head = ("clusters", "ranks", "microbatches", "budget", "planning", "stages", "over bound")
    print(report.table(rows, head))


if __name__ == "__main__":
    main()
