"""Hypothesis strategies: random nets, plans of their programs, and what these recompute."""

import functools
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from hypothesis import assume
from hypothesis import strategies as st

from pfeife.cost import machine
from pfeife.data.plan import Plan, RecomputeOption
from pfeife.ir.outline import inline
from pfeife.ir.parts import Kind
from pfeife.ir.program import Program
from pfeife.passes import partition
from pfeife.sched import policy
from pfeife.sched.cutting import choose_recompute
from pfeife.sched.cutting.workload import blocked_borders
from pfeife.testing.random_net import OPERATIONS, Layer, RandomNet


@st.composite
def nets(
    draw: st.DrawFn, largest: int = 8, linear: int = 0, operations: Sequence[str] = OPERATIONS
) -> RandomNet:
    """Random nets: with skip connections, tied weights, updated buffers, sizes that data decide.

    At least `linear` of the operations, of which there are at most `largest` more, are linear
    layers, so that there is something to cut. In nets of `STATIC` operations data decide no size.
    """
    drawn = draw(st.lists(st.sampled_from(operations), min_size=2, max_size=largest))
    names = draw(st.permutations(["linear"] * linear + drawn))
    layers = [
        Layer(
            operation,
            draw(st.integers(max(0, index - 2), index)),
            draw(st.integers(0, index)),
        )
        for index, operation in enumerate(names)
    ]
    torch.manual_seed(draw(st.integers(0, 1000)))
    return RandomNet(layers)


@st.composite
def plans(
    draw: st.DrawFn,
    program: Program,
    microbatches: int,
    largest: int = 4,
    ranks: int | None = None,
    names: Sequence[str] = ("gpipe", "1f1b"),
) -> Plan:
    """Random plans of a fused and annotated program: cuts, placement and policy.

    At most `largest` stages, on `ranks` ranks or on any number. A program that cannot be cut
    into enough stages is not drawn.
    """
    # A border inside of a buffer's update is refused by `partition`: such plans are not drawn.
    blocked = blocked_borders(program)
    borders = [border for border in range(1, program.units) if border not in blocked]
    assume(len(borders) >= (ranks or 1) - 1)
    chosen = st.sets(
        st.sampled_from(borders or [0]), min_size=(ranks or 1) - 1, max_size=largest - 1
    )
    cuts = draw(chosen) if borders else set()
    stage_of = tuple(sum(cut <= unit for cut in cuts) for unit in range(program.units))
    count = ranks or draw(st.integers(1, len(cuts) + 1))
    placed = tuple(stage % count for stage in range(len(cuts) + 1))
    order = policy(draw(st.sampled_from(names)))(len(cuts) + 1, microbatches, placed)
    return Plan(stage_of, order)


@st.composite
def recomputing(draw: st.DrawFn, plan: Plan, program: Program) -> Plan:
    """A plan of a fused program with what its stages recompute: any of their forwards' nodes, or
    what `choose_recompute` takes for a drawn budget."""
    if draw(st.booleans()):
        choice = functools.partial(
            choose_recompute, partition(plan)(program), machine=machine("cpu-core")
        )
        least, most = (
            max(option.saved for option in choice(budget)) for budget in ("full", "none")
        )
        budgets: Any = st.integers(least, max(least, most)) | st.sampled_from(
            ["none", "full", "selective"]
        )
        return attrs.evolve(plan, recompute=choice(draw(budgets), duplicated=plan.duplicated))
    _, groups = inline(program)
    names: list[list[str]] = [[] for _ in range(plan.stages)]
    for name, group in groups.items():
        if group.kind == Kind.FORWARD and name not in plan.duplicated:
            names[plan.stage_of_cluster[group.unit]].append(name)
    # Nothing can be drawn from an empty list: a stage without such nodes draws "", which is then
    # taken out again.
    drawn = [draw(st.sets(st.sampled_from(stage_names or [""]))) - {""} for stage_names in names]
    options = [RecomputeOption(names=tuple(sorted(chosen))) for chosen in drawn]
    return attrs.evolve(plan, recompute=tuple(options))
