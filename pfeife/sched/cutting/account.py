"""What the planners counted of a plan: the same sums by which they kept to their limit.

They are additive, a stage and a microbatch at a time, for they are asked of plans that are not made
yet. What only a program with messages in an order has is left out or rough: receives that are
posted ahead, what is kept until it has surely arrived, views of one storage, results. The account
of every byte (`memory_curves`) is the judge of what comes out.
"""

from collections import Counter
from collections.abc import Sequence

import attrs

from pfeife.data.machine import Machine
from pfeife.data.plan import Plan
from pfeife.lowering.problem import peak_memory
from pfeife.sched.cutting.cuts import Clusters, stage_bytes
from pfeife.sched.cutting.workload import Workload, stage_problem

_AMPLE = 2**50  # bytes; floats still tell single ones apart


def counted_by_search(
    work: Workload, plan: Plan, machine: Machine, state_factor: float
) -> tuple[int, ...]:
    """Bytes of every rank as `stage_problem` and the search have them."""
    problem = stage_problem(
        work,
        plan.stage_of_cluster,
        plan.stage_ranks,
        plan.schedule.microbatches,
        machine=machine,
        memory_limit=_AMPLE,
        state_factor=state_factor,
    )
    if plan.recompute:
        stages = tuple(
            attrs.evolve(costs, saved=float(option.saved), kept=min(costs.kept, option.saved))
            for costs, option in zip(problem.stages, plan.recompute, strict=True)
        )
        problem = attrs.evolve(problem, stages=stages)
    activations = peak_memory(problem, plan.schedule)
    rooms = problem.memory or ()
    return tuple(int(_AMPLE - room + size) for room, size in zip(rooms, activations, strict=False))


def counted_by_cuts(
    clusters: Clusters, plan: Plan, in_flight: Sequence[int], state_factor: float
) -> tuple[int, ...]:
    """Bytes of every rank as `balanced` has them, which gives each of a rank's stages as much as
    the others: those of the largest, as often as the most stages that a rank has."""
    size, stage_ranks = stage_bytes(clusters, state_factor), plan.stage_ranks
    stages, ranks = [0.0] * len(stage_ranks), [0.0] * (1 + max(stage_ranks))
    for unit, stage in enumerate(plan.stage_of_cluster):
        stages[stage] += size(in_flight[stage], unit, unit + 1)
    for stage, rank in enumerate(stage_ranks):
        ranks[rank] = max(ranks[rank], stages[stage])
    most = max(Counter(stage_ranks).values())
    return tuple(int(largest * most) for largest in ranks)
