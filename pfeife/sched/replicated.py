"""What replicas add to the step of a plan: the reductions that its computing does not hide."""

import attrs

from pfeife.data.plan import Plan
from pfeife.data.replicas import Replicas
from pfeife.data.schedule import Action, Do
from pfeife.ir.program import Reduction
from pfeife.lowering.buckets import reducing_seconds
from pfeife.lowering.lower import insert_actions
from pfeife.lowering.problem import seconds_of, transfers
from pfeife.lowering.simulate import simulate
from pfeife.sched.by_family import slower
from pfeife.sched.cutting.account import Account, units_of
from pfeife.sched.cutting.layouts import Constraints
from pfeife.sched.cutting.stages import stage_problem


def with_reductions(
    plan: Plan, account: Account, constraints: Constraints, replicas: Replicas
) -> Plan:
    """The plan with a step that is longer by what reductions take at its end, each stage's in one
    bucket; the same without replicas, or without gradients."""
    if replicas.count == 1 or plan.step_seconds is None or not any(account.work.gradients):
        return plan
    machine, schedule = constraints.machine, plan.schedule
    problem = slower(
        stage_problem(
            account,
            plan.stage_of_cluster,
            plan.stage_ranks,
            schedule.microbatches,
            machine=machine,
            network=constraints.network,
        ),
        plan.recompute,
    )
    stages = units_of(plan.stage_of_cluster, len(plan.stage_ranks))
    sizes = [sum(account.work.gradients[unit] for unit in units) for units in stages]
    reductions = [
        Reduction(str(stage), (rank,), (stage,), replicas.count)
        for stage, rank in enumerate(plan.stage_ranks)
    ]
    computing = seconds_of(problem)

    def seconds(action: Action) -> float:
        if action.do != Do.REDUCE_GRAD:
            return computing(action)
        kept = replicas.how == "shard"
        return reducing_seconds(replicas.count, sizes[action.stage], kept, machine)

    alone, whole = (
        simulate(insert_actions(schedule, transfers(problem), mine), seconds).seconds
        for mine in ((), reductions)
    )
    return attrs.evolve(plan, step_seconds=plan.step_seconds + whole - alone)
