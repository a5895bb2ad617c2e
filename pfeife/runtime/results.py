"""What comes out of a step: who makes it, and what one rank has of it."""

from collections import ChainMap
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from pfeife.ir.combine import add, combined, mean, tracked_names
from pfeife.ir.evaluate import Result, averaged, with_statistics
from pfeife.ir.nodes import returned
from pfeife.ir.parts import Port, Role
from pfeife.ir.program import Program
from pfeife.runtime.step import Step


def owner(program: Program, port: Port) -> int:
    """The rank that makes an output's value; rank 0 for one that is an input handed through."""
    results = returned(program.module)
    node = results[port.name]
    calls = {call.node: call for call in program.calls}
    # What comes after the last call, such as a view, is where its value was made.
    while isinstance(node, fx.Node) and node.name not in calls and node.all_input_nodes:
        node = node.all_input_nodes[0]
    call = calls.get(node.name) if isinstance(node, fx.Node) else None
    return call.rank or 0 if call else 0


def trained_on(
    program: Program, rank: int, replica: int | None = None, member: int | None = None
) -> frozenset[str]:
    """The names of the parameters whose gradients a rank has after a step; None: one that runs all
    replicas, or all members."""
    ports = program.ports(Role.GRADIENT)
    made = {port.fqn for port in ports if owner(program, port) == rank}
    reduced = [reduction for reduction in program.reductions if rank in reduction.ranks]
    owned = {
        reduction.name
        for reduction in reduced
        if replica is None or reduction.owner in (None, replica)
    }
    here = (made - {reduction.name for reduction in reduced}) | owned
    elsewhere = {p.fqn for p in ports if None not in (member, p.keeper) and p.keeper != member}
    return frozenset(here - elsewhere)


def updated_buffers(program: Program) -> dict[str, str]:
    """Buffer ports that a step updates, by port name, with their canonical names."""
    updated = {port.fqn for port in program.ports(Role.BUFFER_UPDATE)}
    return {port.name: port.fqn for port in program.ports(Role.BUFFER) if port.fqn in updated}


def outputs_by_node(program: Program) -> dict[str, list[Port]]:
    """The output ports of every node that is one, by its name."""
    results = returned(program.module)
    ports_of: dict[str, list[Port]] = {}
    for port in program.outputs:
        ports_of.setdefault(results[port.name].name, []).append(port)
    return ports_of


def local_gradient(program: Program, name: str, step: Step) -> torch.Tensor | None:
    """What a rank has summed up of a parameter's gradient, several ports in their order."""
    parts = (step.sums.get(p.name) for p in program.ports(Role.GRADIENT) if p.fqn == name)
    total: torch.Tensor | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total


def _gradient(program: Program, name: str, step: Step) -> torch.Tensor | None:
    if name in step.gradients:  # reduced
        return step.gradients[name]
    return local_gradient(program, name, step)


def result_of(program: Program, rank: int, step: Step) -> Result:
    """What a rank knows of the step's result once its schedule has run."""
    losses = [
        results[port.name]
        for results in step.results
        for port in program.ports(Role.LOSS)
        if port.name in results
    ]
    gradients = {
        name: gradient
        for name in dict.fromkeys(port.fqn for port in program.ports(Role.GRADIENT))
        if (gradient := _gradient(program, name, step)) is not None
    }
    updates, once = program.ports(Role.BUFFER_UPDATE), tracked_names(program)
    names = {p.fqn for p in updates if owner(program, p) == rank}
    return Result(
        loss=combined(losses, step.part.divided) if losses else None,
        outputs=_by_name(step, program.ports(Role.OUTPUT)),
        gradients=gradients,
        buffers={n: step.buffers[s] for s, n in updated_buffers(program).items() if n in names},
        batch_gradients=_by_name(step, program.ports(Role.BATCH_GRADIENT)),
        statistics=_by_name(step, [port for port in updates if port.fqn in once]),
    )


def _by_name(step: Step, ports: Sequence[Port]) -> tuple[dict[str, torch.Tensor], ...]:
    """What each microbatch has of some ports on a rank."""
    return tuple({p.fqn: r[p.name] for p in ports if p.name in r} for r in step.results)


def joined(program: Program, results: Sequence[Result], sizes: Mapping[str, int]) -> Result:
    """The result of a step, from those of all ranks: of one replica after the other, which are put
    together as `evaluate` does it; `sizes` are those of the step."""
    ranks = len(results) // program.replicas
    pipelines = [_of_pipeline(results[at : at + ranks]) for at in range(0, len(results), ranks)]
    statistics = tuple(microbatch for part in pipelines for microbatch in part.statistics)
    first = with_statistics(program, pipelines[0], statistics, sizes)
    if len(pipelines) == 1:
        return first
    losses = [part.loss for part in pipelines if part.loss is not None]
    return Result(
        loss=(mean if program.averages else add)(losses) if losses else None,
        outputs=tuple(output for part in pipelines for output in part.outputs),
        gradients=first.gradients,
        buffers=first.buffers,
        batch_gradients=averaged(
            program, tuple(g for part in pipelines for g in part.batch_gradients)
        ),
    )


def _of_pipeline(ranks: Sequence[Result]) -> Result:
    """Of its ranks: every value is there once, shared gradients are the same on each."""
    gradients: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    for result in ranks:
        gradients |= {n: g for n, g in result.gradients.items() if n not in gradients}
        buffers |= result.buffers
    # One rank makes the loss, unless the step has none; who was told of it has the same.
    losses = [result.loss for result in ranks if result.loss is not None]
    return Result(
        losses[0] if losses else None,
        _merged([result.outputs for result in ranks]),
        gradients,
        buffers,
        _merged([result.batch_gradients for result in ranks]),
        statistics=_merged([result.statistics for result in ranks]),
    )


def _merged(ranks: Sequence[tuple[dict, ...]]) -> tuple[dict, ...]:
    """One dict a microbatch from those of all ranks."""
    return tuple(dict(ChainMap(*same)) for same in zip(*ranks, strict=True))
