"""What a program means: one step over its microbatches, in one process, level by level the same."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from pfeife import _torch
from pfeife.ir.combine import (
    Divisor,
    add,
    combined,
    loss_divisors,
    loss_tangents,
    mean,
    tracked,
    tracked_names,
)
from pfeife.ir.lockstep import Each, lockstep
from pfeife.ir.messages import call_of
from pfeife.ir.microbatch import check_tensor, named_batch, sizes_of, step_inputs
from pfeife.ir.nodes import returned
from pfeife.ir.parts import STATE_ROLES, Port, ProgramBase, Role

State = Mapping[str, torch.Tensor]


@attrs.frozen(eq=False)
class Result:
    """What a step gives.

    `loss` is the sum of the microbatch losses, each divided by its divisor (for a mean their
    number), added in index order; None without a loss. `outputs` and `batch_gradients` have one
    dict a microbatch, from the port's name or the input's name to a tensor. `gradients` go by the
    parameters' canonical names, `buffers` are the updated ones. `overflow` says, on several ranks,
    whether a gradient on any of them is not finite. `statistics` has one dict a microbatch, of what
    its batch norms have found, from the names of buffers that are updated with it once a step.
    """

    loss: torch.Tensor | None
    outputs: tuple[dict[str, torch.Tensor], ...]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    batch_gradients: tuple[dict[str, torch.Tensor], ...] = ()
    overflow: torch.Tensor | None = None
    statistics: tuple[dict[str, torch.Tensor], ...] = ()

    def named(self) -> dict[tuple[str, str], torch.Tensor]:
        """All of it but the last two, each by what it is and its name."""
        tensors = {("loss", "loss"): self.loss} if self.loss is not None else {}
        tensors |= {("gradient", name): gradient for name, gradient in self.gradients.items()}
        tensors |= {("buffer", name): buffer for name, buffer in self.buffers.items()}
        for kind, microbatches in (("output", self.outputs), ("gradient", self.batch_gradients)):
            for index, values in enumerate(microbatches):
                of = f"of microbatch {index}"
                tensors |= {(kind, f"{name} {of}"): tensor for name, tensor in values.items()}
        return tensors


def state_of(
    program: ProgramBase,
    *roots: nn.Module | Mapping[str, torch.Tensor],
    member: int | None = None,
) -> State:
    """The program's parameters, buffers and constants, found by name in modules or mappings: whole
    ones, as `evaluate` takes them, or the parts of a `member` where these are cut.

    Detached, not copied but for parts. Raises ValueError for what is missing or has another shape
    or dtype.
    """
    tensors: dict[str, torch.Tensor] = {}
    for root in roots:
        if isinstance(root, nn.Module):
            tensors |= dict(root.named_parameters(remove_duplicate=False))
            tensors |= dict(root.named_buffers(remove_duplicate=False))
        else:
            tensors |= root
    state = {}
    for port in program.ports(*STATE_ROLES):
        value = next((tensors[name] for name in port.names if name in tensors), None)
        if value is None:
            raise ValueError(f"the state has no {port.role} {port.fqn}")
        check_tensor(whole_port(port), value, f"{port.role} {port.fqn}")
        state[port.fqn] = value.detach()
        if port.split is not None and port.keeper is None and member is not None:
            state[port.fqn] = port.split.part(value.detach(), member)
    return state


def whole_port(port: Port) -> Port:
    """The port of the whole value, of one that has a member's part."""
    return attrs.evolve(port, shape=port.split.whole(port.shape)) if port.split else port


def as_computed(port: Port, value: torch.Tensor) -> torch.Tensor:
    """What a program computes with where it is given a parameter: a copy of master weights."""
    return value if port.held is None else value.to(port.dtype)


def evaluate(
    program: ProgramBase,
    state: State,
    microbatches: Sequence[Any],
    *,
    seed: int = 0,
    tangents: Sequence[Mapping[str, torch.Tensor]] | None = None,
    scale: float = 1.0,
) -> Result:
    """One training step, in one process, whatever the level of the program.

    `state` maps canonical names to tensors and is not changed; `tangents` gives, per
    microbatch, the gradient of each output where the loss is outside; `scale` is the gradient of
    the loss where it is inside. Buffers are updated in
    microbatch order. With replicas the microbatches are assigned to them in equal, contiguous
    parts; each takes a step of its own from the same buffers, loss and gradients are averaged in
    replica order (added, where the loss is outside or a sum), and the buffers are those of the
    first.
    Raises ValueError when shapes, dtypes or counts do not fit.

    >>> net = torch.nn.Linear(2, 1, bias=False)
    >>> flat = pfeife.capture(lambda x: net(x).mean(), torch.ones(1, 2))
    >>> state = {"weight": torch.tensor([[1.0, 3.0]])}  # or pfeife.state_of(flat, net)
    >>> result = pfeife.evaluate(flat, state, [torch.ones(1, 2), 2 * torch.ones(1, 2)])
    >>> result.loss, result.gradients["weight"]
    (tensor(6.), tensor([[1.5000, 1.5000]]))
    """
    count = len(microbatches)
    if count == 0 or count % program.replicas:
        raise ValueError(
            f"{count} microbatches cannot be assigned evenly to {program.replicas} replicas"
        )
    per_replica = count // program.replicas
    divided = loss_divisors(program, microbatches)
    run = functools.partial(
        _one_pipeline, program, state, microbatches, tangents, seed, divided, scale
    )
    # Replica r has the microbatches from r * per_replica on, as on ranks: which of them share a
    # replica decides the order of the sums, and so their last bits.
    parts = [run(range(start, start + per_replica)) for start in range(0, count, per_replica)]
    sizes = sizes_of(program, microbatches[0])
    if len(parts) == 1:
        return with_statistics(program, parts[0], parts[0].statistics, sizes)
    statistics = tuple(figures for part in parts for figures in part.statistics)
    losses = [part.loss for part in parts if part.loss is not None]
    together = mean if program.averages else add
    gradients = (grads for part in parts for grads in part.batch_gradients)
    return Result(
        loss=together(losses) if losses else None,
        outputs=tuple(output for part in parts for output in part.outputs),
        gradients={
            name: together([part.gradients[name] for part in parts]) for name in parts[0].gradients
        },
        buffers=with_statistics(program, parts[0], statistics, sizes).buffers,
        batch_gradients=averaged(program, tuple(gradients)),
    )


def with_statistics(
    program: ProgramBase,
    result: Result,
    statistics: Sequence[dict[str, torch.Tensor]],
    sizes: Mapping[str, int],
) -> Result:
    """A result in which buffers that are updated once a step, and have their values of before, are
    updated with the statistics of all microbatches, where the size ports have such values."""
    if not program.tracked:
        return result
    new = tracked(program, result.buffers, statistics, sizes)
    return attrs.evolve(result, buffers={**result.buffers, **new}, statistics=())


def averaged(
    program: ProgramBase, gradients: tuple[dict[str, torch.Tensor], ...]
) -> tuple[dict[str, torch.Tensor], ...]:
    """Gradients of batch inputs of every replica's own loss, as those of the mean loss."""
    if not program.averages:
        return gradients
    return tuple(
        {n: g / program.replicas for n, g in microbatch.items()} for microbatch in gradients
    )


def _run(program: ProgramBase, values: Sequence[Any]) -> Mapping[str, torch.Tensor]:
    """The results of a microbatch, by the names of the output ports, of the values of the inputs:
    all of them whole, also of a program for members, but for gradients of which each of these has
    an addend: they are [members, *gradient]. Raises ValueError if these disagree about what
    all of them should have."""
    if program.members == 1:
        results: Mapping[str, torch.Tensor] = program.module(*values)
        return results
    parts = [
        Each((value,) * program.members if port.split is None else tuple(port.split.parts(value)))
        for port, value in zip(program.inputs, values, strict=True)
    ]
    of_members = lockstep(program.module, parts).values
    return {
        port.name: _whole(port, [own[port.name] for own in of_members]) for port in program.outputs
    }


def _whole(port: Port, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if port.partial:
        return torch.stack([*parts])
    if port.split is not None:
        return port.split.join(parts)
    first, *others = (value.to_dense() for value in parts)  # of a sparse gradient too
    for value in others:
        if not torch.allclose(value, first, rtol=0.0, atol=0.0, equal_nan=True):
            raise ValueError(
                f"the members of the program have different values of {port.role} {port.fqn}, "
                "which is not cut: a sum of their parts is missing"
            )
    return parts[0]


def _added_up(program: ProgramBase, sums: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of the sums over microbatches. What several stages give to one is added at the end:
    what those of one rank give, then these by rank, then by member. So do ranks, in a reduction."""
    rank_of = {call.node: call.rank or 0 for call in program.calls}
    results = returned(program.module)
    of_ranks: dict[str, dict[int, torch.Tensor]] = {}
    for port in program.ports(Role.GRADIENT):
        ranks, part = of_ranks.setdefault(port.fqn, {}), sums[port.name]
        rank = rank_of.get(call_of(results[port.name]).name, 0)
        ranks[rank] = ranks[rank] + part if rank in ranks else part
    gradients = {
        name: add([ranks[rank] for rank in sorted(ranks)]) for name, ranks in of_ranks.items()
    }
    for name in {port.fqn for port in program.ports(Role.GRADIENT) if port.partial}:
        gradients[name] = add(gradients[name].unbind())
    return gradients


def _one_pipeline(
    program: ProgramBase,
    state: State,
    microbatches: Sequence[Any],
    tangents: Sequence[Mapping[str, torch.Tensor]] | None,
    seed: int,
    divided: Sequence[Divisor],
    scale: float,
    indices: range,
) -> Result:
    held = {port.name: as_computed(port, state[port.fqn]) for port in program.ports(*STATE_ROLES)}
    arriving = loss_tangents(program, divided, scale)
    slots = {port.fqn: port.name for port in program.ports(Role.BUFFER)}
    once = tracked_names(program)
    updates = [port for port in program.ports(Role.BUFFER_UPDATE) if port.fqn not in once]
    sums: dict[str, torch.Tensor] = {}
    results: list[dict[str, torch.Tensor]] = []
    for index in indices:
        batch = named_batch(program, microbatches[index], index)
        output_tangents = tangents[index] if tangents is not None else None
        values = held | arriving[index] | step_inputs(program, batch, index, seed, output_tangents)
        with torch.no_grad(), _torch.no_autocast():
            result = dict(_run(program, [values[port.name] for port in program.inputs]))
        # the next microbatch reads what this one has written
        held |= {slots[port.fqn]: result[port.name] for port in updates}
        for port in program.ports(Role.GRADIENT):  # not kept: each is as large as the model
            value = result.pop(port.name)
            sums[port.name] = sums[port.name] + value if port.name in sums else value
        results.append(result)

    def named(role: Role) -> tuple[dict[str, torch.Tensor], ...]:
        ports = program.ports(role)
        return tuple({port.fqn: result[port.name] for port in ports} for result in results)

    gradients = _added_up(program, sums)
    losses = [loss for loss_of in named(Role.LOSS) for loss in loss_of.values()]
    # After the last microbatch what is held of a buffer is its new value.
    updated = {port.fqn: held[slots[port.fqn]] for port in updates}
    return Result(
        loss=combined(losses, divided[indices.start : indices.stop]) if losses else None,
        outputs=named(Role.OUTPUT),
        gradients=gradients,
        buffers=updated | {name: state[name] for name in once},  # of before, see with_statistics
        batch_gradients=named(Role.BATCH_GRADIENT),
        statistics=tuple(
            {name: value for name, value in new.items() if name in once}
            for new in named(Role.BUFFER_UPDATE)
        ),
    )
