"""The scheduling problem that cuts and placements make of a workload."""

from collections.abc import Iterable, Mapping, Sequence

import attrs

from pfeife.data.network import Network
from pfeife.data.plan import Plan
from pfeife.ir.parts import Kind
from pfeife.lowering.envelope import Travel, travel
from pfeife.lowering.problem import Edge, Problem, StageCosts, peak_memory
from pfeife.sched.cutting.account import NO_RELIEF, Account, Relief, units_of
from pfeife.sched.cutting.border_links import NO_TRAVEL, Machines, joint
from pfeife.sched.cutting.constraints import Constraints
from pfeife.sched.cutting.workload import Workload


def stage_problem(
    account: Account,
    stage_of: Sequence[int],
    stage_ranks: Sequence[int],
    microbatches: int,
    *,
    machine: Machines,
    network: Network | None = None,
    relief: Relief = NO_RELIEF,
    busy: bool = False,
) -> Problem:
    """The problem of scheduling given stages on given ranks, with what clusters compute again, and
    without a limit of memory (`room_for` has one). Stages that are `busy` compute for as much
    longer as messages take of their ranks' time."""
    sent = _messages(account.work, stage_of, stage_ranks)

    def transfer(source: int, destination: int, forward: bool) -> Travel:
        sizes = sent.get((source, destination, forward))
        ends = (stage_ranks[source], stage_ranks[destination])
        if not sizes or ends[0] == ends[1]:
            return NO_TRAVEL
        # An edge has the name of its forward direction: its gradients go over the link the other
        # way.
        link = joint(machine, network, *(ends if forward else ends[::-1]))
        return travel(sizes, link)

    pairs = sorted({(source, destination) for source, destination, _ in sent})
    both = {pair: (transfer(*pair, True), transfer(*pair, False)) for pair in pairs}
    edges = tuple(
        Edge(*pair, ahead.arriving, back.arriving) for pair, (ahead, back) in both.items()
    )
    stage_units = units_of(stage_of, len(stage_ranks))
    stages = tuple(
        _costs(account, units, relief, rank)
        for units, rank in zip(stage_units, stage_ranks, strict=True)
    )
    if busy:
        stages = _busy(stages, both)
    return Problem(stages, tuple(stage_ranks), microbatches, edges)


def problem_of(
    account: Account,
    constraints: Constraints,
    stage_of: Sequence[int],
    stage_ranks: Sequence[int],
    relief: Relief = NO_RELIEF,
    busy: bool = False,
) -> Problem:
    """`stage_problem` with the microbatches, machines and links that a plan is for."""
    machine, network, m = constraints.machines, constraints.network, constraints.microbatches
    return stage_problem(
        account,
        stage_of,
        stage_ranks,
        m,
        machine=machine,
        network=network,
        relief=relief,
        busy=busy,
    )


def _busy(
    stages: Sequence[StageCosts], messages: Mapping[tuple[int, int], tuple[Travel, Travel]]
) -> tuple[StageCosts, ...]:
    """The stages with what their messages take of the time of their ranks."""
    forward, backward = ([0.0] * len(stages) for _ in range(2))
    for (source, destination), (ahead, back) in messages.items():
        forward[source] += ahead.sending
        forward[destination] += ahead.receiving
        backward[destination] += back.sending
        backward[source] += back.receiving
    return tuple(
        attrs.evolve(
            costs, forward=costs.forward + there, input_backward=costs.input_backward + here
        )
        for costs, there, here in zip(stages, forward, backward, strict=True)
    )


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


def _costs(account: Account, units: Sequence[int], relief: Relief, rank: int) -> StageCosts:
    work = account.work

    def total(kind: Kind) -> float:
        return sum(work.of(kind, unit, rank) for unit in units)

    again = sum(relief.options[unit].extra_seconds for unit in units if unit in relief.options)
    saved = float(account.saved(units, relief))
    return StageCosts(
        total(Kind.FORWARD),
        total(Kind.BACKWARD) + total(Kind.INPUT_BACKWARD) + again,
        total(Kind.WEIGHT_BACKWARD),
        saved,
        # `saved` is less where something is recomputed, and a W then needs no more than that
        min(float(account.held(units).for_weights), saved),
        work.splittable,
    )


def room_for(limit: float, always: Iterable[int]) -> tuple[float, ...]:
    """Bytes for activations on ranks that need so many all the time, of a limit for each."""
    return tuple(float(max(limit - needed, 0)) for needed in always)


def bytes_of(account: Account, plan: Plan, machine: Machines) -> list[int]:
    """Bytes of every rank of a plan by the sums."""
    stage_of, stage_ranks = plan.stage_of_cluster, plan.stage_ranks
    units = units_of(stage_of, len(stage_ranks))
    # A stage's saving stands at its first cluster, since sums are taken of whole stages alone. A
    # plan that recomputes nothing has no options, and saves nothing here.
    less = {
        stage_units[0]: account.held(stage_units).late - option.saved
        for option, stage_units in zip(plan.recompute, units, strict=False)
    }
    m = plan.schedule.microbatches
    # Without a network: bytes do not depend on links.
    problem = stage_problem(
        account, stage_of, stage_ranks, m, machine=machine, relief=Relief(bytes=less)
    )
    always = account.always(stage_of, stage_ranks, m)
    activations = peak_memory(problem, plan.schedule)
    return [int(a + b) for a, b in zip(always, activations, strict=False)]
