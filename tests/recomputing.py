"""Plans of the tests' models in which stages compute again."""

import functools

import attrs
import torch
from programs import CPU_CORE, captured, clusters

import pfeife
from pfeife import sched
from pfeife.ir.parts import Kind
from pfeife.sched.cutting import choose_recompute

# So slow at products that "selective" does none of them again.
NO_PRODUCTS = attrs.evolve(CPU_CORE, flops=CPU_CORE.flops["float32"] / 1e4)


@functools.cache
def planned(name: str, stages: int, policy: str = "1f1b"):
    fused = clusters(captured(name)[1])
    # The best cut of the GPT is within a block; these tests count on one value at the border.
    cuts = (
        [int(unit >= 12) for unit in range(fused.units)] if (name, stages) == ("GPT", 2) else None
    )
    plan = sched.plan(
        fused, machine=CPU_CORE, microbatches=4, stages=stages, schedule=policy, cuts=cuts
    )
    return fused, plan, pfeife.partition(plan)(fused)


def chosen(name: str, stages: int, budget, policy: str = "1f1b"):
    """A plan with what a budget has its stages recompute, and its stage calls."""
    fused, plan, staged = planned(name, stages, policy)
    choice = choose_recompute(staged, budget, machine=CPU_CORE, duplicated=plan.duplicated)
    plan = attrs.evolve(plan, recompute=choice)
    return plan, pfeife.partition(plan)(fused)


def again(program: pfeife.Program, kind: Kind, unit: int) -> list[torch.fx.Node]:
    """The nodes of a body that compute something a second time."""
    nodes = program.body(program.call(kind, unit)).graph.nodes
    return [node for node in nodes if node.op == "call_function" and "_again" in node.name]
