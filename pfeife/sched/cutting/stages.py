"""The scheduling problem that cuts and placements make of a workload."""

from collections.abc import Sequence

import attrs

from pfeife.data.machine import Machine, Network
from pfeife.data.plan import Plan
from pfeife.ir.program import Kind
from pfeife.lowering.envelope import travel
from pfeife.lowering.problem import Edge, Problem, StageCosts, peak_memory
from pfeife.sched.cutting.account import all_the_time, held, saved_by, units_of
from pfeife.sched.cutting.workload import Workload


def stage_problem(
    work: Workload,
    stage_of: Sequence[int],
    stage_ranks: Sequence[int],
    microbatches: int,
    *,
    machine: Machine,
    network: Network | None = None,
    memory_limit: float | None = None,
) -> Problem:
    """The problem of scheduling given stages on given ranks.

    A rank's memory for activations is `memory_limit` without what it needs all the time (see
    `account`); without a limit there is none to keep to either.
    """
    sent = _messages(work, stage_of, stage_ranks)

    def transfer(source: int, destination: int, forward: bool) -> float:
        sizes = sent.get((source, destination, forward))
        ends = (stage_ranks[source], stage_ranks[destination])
        if not sizes or ends[0] == ends[1]:
            return 0.0
        link = network.link(*(ends if forward else ends[::-1])) if network else None
        return travel(sizes, link or machine).arriving

    pairs = sorted({(source, destination) for source, destination, _ in sent})
    edges = tuple(Edge(a, b, transfer(a, b, True), transfer(a, b, False)) for a, b in pairs)
    stages = tuple(_costs(work, units) for units in units_of(stage_of, len(stage_ranks)))
    memory = None
    if memory_limit is not None:
        taken = all_the_time(work, stage_of, stage_ranks, microbatches)
        memory = tuple(float(max(memory_limit - one, 0)) for one in taken)
    return Problem(stages, tuple(stage_ranks), microbatches, edges, memory)


def _messages(
    work: Workload, stage_of: Sequence[int], stage_ranks: Sequence[int]
) -> dict[tuple[int, int, bool], list[int]]:
    """Bytes of the values of every message of a microbatch, by the earlier stage, the later one,
    and whether it is the forward's: to every other rank once, for the first stage there that
    reads it."""
    # The first to read a value is the lowest stage, of a gradient the highest; an edge is named
    # by its forward direction in both cases.
    sent: dict[tuple[int, int, bool], list[int]] = {}
    for flow in work.flows:
        maker, forward = stage_of[flow.unit], flow.kind == Kind.FORWARD
        first: dict[int, int] = {}
        for unit, kind in flow.readers:
            stage = stage_of[unit]
            if stage != maker and (kind == Kind.FORWARD) == forward:
                pick = min if forward else max
                first[stage_ranks[stage]] = pick(first.get(stage_ranks[stage], stage), stage)
        for stage in first.values():
            key = (maker, stage, True) if forward else (stage, maker, False)
            sent.setdefault(key, []).append(flow.bytes)
    return sent


def _costs(work: Workload, units: Sequence[int]) -> StageCosts:
    def total(kind: Kind) -> float:
        return sum(work.of(kind, unit) for unit in units)

    again = sum(work.recompute[unit].extra_seconds for unit in units if unit in work.recompute)
    saved = float(saved_by(work, units))
    return StageCosts(
        total(Kind.FORWARD),
        total(Kind.BACKWARD) + total(Kind.INPUT_BACKWARD) + again,
        total(Kind.WEIGHT_BACKWARD),
        saved,
        min(float(held(work, units).kept), saved),
        work.splittable,
    )


def least_of(
    work: Workload, stage_of: Sequence[int], stage_ranks: Sequence[int], microbatches: int
) -> list[int]:
    """Bytes that every rank needs to have one microbatch in flight."""
    found = all_the_time(work, stage_of, stage_ranks, microbatches)
    for rank, units in zip(stage_ranks, units_of(stage_of, len(stage_ranks)), strict=True):
        found[rank] += saved_by(work, units)
    return found


def always_of(work: Workload, plan: Plan) -> list[int]:
    """Bytes of every rank of a plan without activations."""
    m = plan.schedule.microbatches
    return all_the_time(work, plan.stage_of_cluster, plan.stage_ranks, m)


def counted(work: Workload, plan: Plan, machine: Machine) -> list[int]:
    """Bytes of every rank of a plan."""
    stage_of, stage_ranks = plan.stage_of_cluster, plan.stage_ranks
    relieved = {
        units[0]: held(work, units).late - option.saved
        for option, units in zip(plan.recompute, units_of(stage_of, len(stage_ranks)), strict=False)
    }
    work, m = attrs.evolve(work, recompute={}, relieved=relieved), plan.schedule.microbatches
    problem = stage_problem(work, stage_of, stage_ranks, m, machine=machine)
    activations = peak_memory(problem, plan.schedule)
    return [int(a + b) for a, b in zip(always_of(work, plan), activations, strict=False)]
