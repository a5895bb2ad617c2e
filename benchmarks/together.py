"""Cuts and schedule searched together, against an even split with the best family.

    python benchmarks/together.py

Two Gloo ranks; costs measured cluster by cluster. The even split has the same number of clusters
in every stage; the best family is the one that is predicted to be fastest on it.
"""

import statistics

import attrs
import models
import torch
import torch.distributed as dist
from harness import in_turn, mean_costs, of_rank_zero, ready, run

import pfeife
from pfeife import report, sched
from pfeife.cost import machine, measure
from pfeife.cost.network import bench_network
from pfeife.sched.families.policies import POLICIES, placement

MICROBATCHES, RANKS = 8, 2


def even_plans(clusters: pfeife.Program) -> dict[str, pfeife.Plan]:
    """Every family on an even split into one and two stages a rank."""
    found = {}
    for name in POLICIES:
        for stages in (RANKS, 2 * RANKS):
            cut = tuple(unit * stages // clusters.units for unit in range(clusters.units))
            try:
                stage_ranks = placement(name, stages, RANKS)
                order = sched.verify_schedule(POLICIES[name](stages, MICROBATCHES, stage_ranks))
            except ValueError:
                continue  # a family that wants another number of stages
            found[f"{name}, {stages} stages"] = pfeife.Plan(cut, order)
    return found


def main(repeats: int = 7) -> None:
    network = bench_network()
    host = attrs.evolve(machine("cpu-core"), action_seconds=2e-5)
    rows = []
    for make in (models.large_head, models.skip_net):
        torch.manual_seed(0)
        case = make()
        clusters = pfeife.split_backward()(pfeife.fuse()(pfeife.capture(case.step, *case.draw())))
        clusters = pfeife.annotate(mean_costs(measure(clusters, repeats=27)))(clusters)
        planned = sched.plan(
            clusters,
            machine=host,
            microbatches=MICROBATCHES,
            ranks=RANKS,
            schedule="search",
            network=network,
            search_seconds=10.0,
        )
        searched = ready(of_rank_zero(planned), clusters, case)
        evens = {name: ready(plan, clusters, case) for name, plan in even_plans(clusters).items()}

        def predicted(one):
            return sched.predict(one.program, one.schedule, host, network).seconds

        names = [None] * 1
        if dist.get_rank() == 0:
            names = [min(evens, key=lambda name: predicted(evens[name]))]
        dist.broadcast_object_list(names)
        rival = evens[names[0]]
        ours, theirs = map(statistics.median, in_turn([searched, rival], repeats))
        rows.append(
            (
                case.name,
                names[0],
                f"{planned.stages} on {planned.stage_ranks}",
                f"{1e3 * predicted(rival):.1f} ms",
                f"{1e3 * predicted(searched):.1f} ms",
                f"{predicted(rival) / predicted(searched):.2f}",
                f"{1e3 * theirs:.1f} ms",
                f"{1e3 * ours:.1f} ms",
                f"{theirs / ours:.2f}",
                f"{100 * (planned.step_seconds / planned.bound_seconds - 1):.1f} %",
            )
        )
    if dist.get_rank() == 0:
        head = ("model", "best family on an even split", "searched stages", "predicted even")
        head = (*head, "searched", "ratio", "measured even", "searched", "ratio", "over bound")
        print(report.table(rows, head))


if __name__ == "__main__":
    run(__file__, main)
