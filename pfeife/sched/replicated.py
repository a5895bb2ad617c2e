"""What replicas add to the step of a plan: the reductions that its computing does not hide."""

from collections.abc import Sequence
from functools import partial

import attrs

from pfeife.data.machine import Machine
from pfeife.data.plan import Plan
from pfeife.data.replicas import Replicas
from pfeife.data.schedule import Action, Do, Schedule
from pfeife.ir.parts import Reduction
from pfeife.lowering.buckets import reducing_seconds
from pfeife.lowering.lower import insert_actions
from pfeife.lowering.problem import Problem, seconds_of, transfers
from pfeife.lowering.simulate import simulate
from pfeife.sched.by_family import slower
from pfeife.sched.cutting.account import Account, units_of
from pfeife.sched.cutting.constraints import Constraints
from pfeife.sched.cutting.stages import problem_of
from pfeife.sched.joint import After


def _reducing(
    account: Account,
    machine: Machine,
    replicas: Replicas,
    stage_of: Sequence[int],
    problem: Problem,
    schedule: Schedule,
) -> float:
    """Seconds that the reductions of replicas, each stage's in one bucket, take at the end of a
    schedule of a problem, whose clusters are in these stages."""
    stages = units_of(stage_of, len(problem.stages))
    sizes = [sum(account.work.gradients[unit] for unit in units) for units in stages]
    count, computing = replicas.count, seconds_of(problem)

    def seconds(action: Action) -> float:
        if action.do != Do.REDUCE_GRAD:
            return computing(action)
        return reducing_seconds(count, sizes[action.stage], replicas.how == "shard", machine)

    reductions = [
        Reduction(str(stage), (rank,), (stage,), count)
        for stage, rank in enumerate(problem.stage_ranks)
    ]
    # The difference alone counts: what a rank reduces while others compute costs the step nothing.
    alone, whole = (
        simulate(insert_actions(schedule, transfers(problem), added), seconds).seconds
        for added in ((), reductions)
    )
    return whole - alone


def reductions_of(account: Account, constraints: Constraints, replicas: Replicas) -> After | None:
    """What reductions take at the end of a schedule; None without replicas, or without
    gradients."""
    if replicas.count == 1 or not any(account.work.gradients):
        return None
    return partial(_reducing, account, constraints.machine, replicas)


def with_reductions(
    plan: Plan, account: Account, constraints: Constraints, reductions: After | None
) -> Plan:
    """The plan with a step that is longer by what reductions take at its end."""
    if reductions is None or plan.step_seconds is None:
        return plan
    problem = problem_of(account, constraints, plan.stage_of_cluster, plan.stage_ranks)
    problem = slower(problem, plan.recompute)
    more = reductions(plan.stage_of_cluster, problem, plan.schedule)
    return attrs.evolve(plan, step_seconds=plan.step_seconds + more)
