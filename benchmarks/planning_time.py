"""How long planning takes: cuts, placement and schedule of a deep GPT, for many ranks.

    python benchmarks/planning_time.py [--growth | --largest | --mesh]

The time is that of `sched.plan` from the annotated clusters on; capture and fusion come before.
With `--growth` a chain of uneven stages in bare numbers is scheduled by a family and by a search,
verified and simulated, at sizes that double up to 256 ranks and 2,048 microbatches: seconds of each
part, and the most memory that the process has had so far. `--largest` has the largest size alone.
`--mesh` plans 1F1B for the deepest GPT on 1,024 ranks, 16 replicas of 64 stages, from its clusters
to what each rank is predicted to do.
"""

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from random import Random

import models

import pfeife
from pfeife import report, sched
from pfeife.cost import estimate, machine
from pfeife.lowering.lower import insert_actions
from pfeife.lowering.problem import Problem, StageCosts, chain_edges, seconds_of, transfers

# layers, ranks, microbatches, search_seconds (20 is the default)
CASES = ((50, 8, 64, 20.0), (200, 16, 128, 20.0), (200, 64, 512, 120.0))
SIZES = ((32, 256), (64, 512), (128, 1024), (256, 2048))  # ranks, microbatches
SEARCHED = {32: 5.0, 64: 10.0, 128: 30.0, 256: 90.0}  # seconds by the ranks


def clusters_of(layers: int, host: pfeife.Machine) -> pfeife.Program:
    case = models.language("GPT", models.GPT(32, layers, 100, 8), 100, 1, 8)
    program = pfeife.fuse()(pfeife.capture(case.step, *case.draw()))
    split = pfeife.split_backward()(program)
    return pfeife.annotate(estimate(split, host))(split)


def plans() -> Iterator[tuple]:
    host = machine("h100-sxm")
    known: dict[int, pfeife.Program] = {}
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
        yield (program.units, ranks, microbatches, *times, plan.stages, f"{gap:.2f} %")


def chain(ranks: int, microbatches: int) -> Problem:
    """One uneven stage a rank, with memory for three quarters of what 1F1B holds on the first."""
    random = Random(5)
    stages = tuple(
        StageCosts(*(random.uniform(0.5, 1.5) for _ in range(3)), 1.0, 0.5) for _ in range(ranks)
    )
    memory = (float(max(1, 3 * ranks // 4)),) * ranks
    return Problem(stages, tuple(range(ranks)), microbatches, chain_edges(ranks, 0.05), memory)


class Clock:
    """Times the parts of a row, in turn."""

    def __init__(self) -> None:
        self.took: list[str] = []

    def __call__(self, work: Callable):
        start = time.perf_counter()
        made = work()
        self.took.append(f"{time.perf_counter() - start:.1f} s")
        return made


def memory_so_far() -> str:
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB"  # KiB on Linux


def parts(ranks: int, microbatches: int, search: bool) -> tuple:
    """The row of a size: seconds of every part."""
    problem, timed = chain(ranks, microbatches), Clock()
    if search:
        budget = SEARCHED.get(ranks, 5.0)
        schedule = timed(lambda: sched.search_schedule(problem, seconds=budget)).schedule
    else:
        schedule = timed(lambda: sched.families.one_f_one_b(ranks, microbatches))
    timed(lambda: sched.verify_schedule(schedule))
    timed(lambda: sched.lower_bound(problem))
    lowered = timed(lambda: insert_actions(schedule, transfers(problem)))
    timeline = timed(lambda: sched.simulate(lowered, seconds_of(problem)))
    how = f"search, {budget:.0f} s" if search else "1f1b"
    step = f"{timeline.seconds:.0f}"
    return (ranks, microbatches, how, *timed.took, step, memory_so_far())


def mesh(layers: int, stages: int, replicas: int, microbatches: int) -> tuple:
    """The row of a mesh: seconds of every part, for the program of every rank."""
    host, timed = machine("h100-sxm"), Clock()
    program = clusters_of(layers, host)
    plan = timed(
        lambda: sched.plan(
            program,
            machine=host,
            microbatches=microbatches,
            stages=stages,
            ranks=stages,
            replicas=replicas,
            memory_limit=10**15,
        )
    )
    on_ranks = pfeife.compose(
        pfeife.partition(plan),
        pfeife.insert_send_recv(),
        pfeife.dp_wrap(pfeife.Mesh(stages, replicas)),
    )
    ranks = timed(lambda: on_ranks(program))
    lowered = timed(lambda: sched.lower(sched.verify_schedule(plan.schedule), ranks))
    step = timed(lambda: sched.predict(ranks, lowered, host)).seconds
    shape = (program.units, stages * replicas, replicas, microbatches)
    return (*shape, *timed.took, f"{step:.1f} s", memory_so_far())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--growth", action="store_true", help="bare numbers, sizes that double")
    parser.add_argument("--largest", action="store_true", help="bare numbers, the largest size")
    parser.add_argument("--mesh", action="store_true", help="1,024 ranks, 16 replicas of 64")
    options = parser.parse_args()
    if options.mesh:
        head = ("clusters", "ranks", "replicas", "microbatches", "planned", "passes", "verified")
        head = (*head, "predicted", "step", "memory")
        rows = [mesh(200, 64, 16, 512)]
    elif options.growth or options.largest:
        head = ("ranks", "microbatches", "schedule", "planned", "verified", "bound", "lowered")
        head = (*head, "simulated", "step", "memory")
        sizes = SIZES[-1:] if options.largest else SIZES
        rows = [parts(*size, search) for size in sizes for search in (False, True)]
    else:
        head = ("clusters", "ranks", "microbatches", "budget", "planning", "stages", "over bound")
        rows = list(plans())
    print(report.table(rows, head))


if __name__ == "__main__":
    main()
