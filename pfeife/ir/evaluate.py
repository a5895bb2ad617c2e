"""What a program means: one step over its microbatches, in one process, level by level the same."""

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils import _pytree as pytree

from pfeife import _torch
from pfeife.ir.parts import STATE_ROLES, Count, Port, Role
from pfeife.ir.program import Program
from pfeife.ir.seeding import mix
from pfeife.ir.sizes import broken_limit, sizes_in
from pfeife.ir.statistics import tracked, tracked_names

State = Mapping[str, torch.Tensor]


@attrs.frozen(eq=False)
class Counted:
    """A microbatch of which another process has told what it counts: the values of the program's
    `counts`, in their order; and what of it this process has, if anything."""

    counts: Sequence[torch.Tensor]
    microbatch: Any = None


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


def state_of(program: Program, *roots: nn.Module | Mapping[str, torch.Tensor]) -> State:
    """The program's parameters, buffers and constants, found by name in modules or mappings.

    Detached, not copied. Raises ValueError for what is missing or has another shape or dtype.
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
        check_tensor(port, value, f"{port.role} {port.fqn}")
        state[port.fqn] = value.detach()
    return state


def check_tensor(
    port: Port, value: Any, where: str, sizes: Mapping[str, int] | None = None
) -> None:
    """Raises ValueError unless a value has the port's shape, where the program's size ports have
    such values (or as many dimensions, where data decide their size), and its dtype."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{where}: expected a tensor, got {type(value).__name__}")
    shape = port.shape if sizes is None else port.shape_at(sizes)
    fits = value.dim() == len(shape) if port.sized_by_data else value.shape == shape
    if not fits or value.dtype != port.given_dtype:
        raise ValueError(
            f"{where}: the program was captured for {port.given_dtype} {list(shape)}, "
            f"this is {value.dtype} {list(value.shape)}"
        )


def named_batch(program: Program, microbatch: Any, index: int = 0) -> dict[str, Any]:
    """The batch ports' tensors of one microbatch and the values of the size ports, checked.

    A microbatch is a mapping from names (also of sizes that its shapes do not tell), or what the
    step was captured with: its tensors in their order (a tuple of the arguments, or a single
    argument).
    """
    ports = program.ports(Role.BATCH)
    if isinstance(microbatch, Counted):
        microbatch = microbatch.microbatch
    if isinstance(microbatch, Mapping) and all(port.fqn in microbatch for port in ports):
        values = [microbatch[port.fqn] for port in ports]
    else:
        values = _tensors(microbatch)
        if len(values) != len(ports):
            names = [port.fqn for port in ports]
            raise ValueError(
                f"microbatch {index} has {len(values)} tensors, the program takes {names}; "
                "pass a dict from names if the step does not use all of them"
            )
    named = {port.name: value for port, value in zip(ports, values, strict=True)}
    by_name = microbatch if isinstance(microbatch, Mapping) else {}
    stated_sizes = {p.name: by_name[p.name] for p in program.ports(Role.SIZE) if p.name in by_name}
    sizes = sizes_in(program, {**named, **stated_sizes})
    for port, value in zip(ports, values, strict=True):
        check_tensor(port, value, f"microbatch {index}, input {port.fqn}", sizes)
    broken = broken_limit(program, sizes)
    if broken:
        raise ValueError(
            f"microbatch {index} has the sizes {sizes}, and the program was captured for {broken}: "
            "capture another one for such sizes"
        )
    return named | sizes


def _sizes(program: Program, microbatch: Any) -> dict[str, int]:
    """The values of a program's size ports, by their names."""
    ports = program.ports(Role.SIZE)
    batch = named_batch(program, microbatch) if ports else {}
    return {port.name: batch[port.name] for port in ports}


def _tensors(microbatch: Any) -> list[torch.Tensor]:
    """Those of a microbatch in their order; most are tuples of tensors, which need no search."""
    # a list, not a generator: every step comes here for every microbatch
    if type(microbatch) is tuple and all([isinstance(value, torch.Tensor) for value in microbatch]):
        return list(microbatch)
    return [leaf for leaf in pytree.tree_leaves(microbatch) if isinstance(leaf, torch.Tensor)]


def as_computed(port: Port, value: torch.Tensor) -> torch.Tensor:
    """What a program computes with where it is given a parameter: a copy of master weights."""
    return value if port.held is None else value.to(port.dtype)


Divisor = int | torch.Tensor  # a scalar in float64, or a number


def loss_divisors(program: Program, microbatches: Sequence[Any]) -> list[Divisor]:
    """What every microbatch's loss is divided by before the losses are added: see `divisors`."""
    ports = program.ports(Role.LOSS)
    if not ports:
        return [1] * len(microbatches)
    return divisors(program, ports[0], microbatches, program.replicas)


def divisors(
    program: Program, port: Port, microbatches: Sequence[Any], pipelines: int = 1
) -> list[Divisor]:
    """What every microbatch of a result is divided by before they are added: 1 for a sum, their
    number for a mean, and their mean count over its own count for a weighted mean.

    `microbatches` are those of all pipelines, of which each has its own mean; the means are
    averaged. Raises ValueError for a mean over nothing.
    """
    if port.reduction == "sum" or len(microbatches) == 1:
        return [1] * len(microbatches)
    weighted = port.reduction == "weighted"
    for index in port.counts:
        count = program.counts[index]
        counts = _counts(program, count, microbatches)
        _refuse_nothing(count, counts, empty_is_zero=weighted and count.empty_is_zero)
        # The mean of the batch is sum(loss[k] * count[k]) / sum(count). With several pipelines the
        # sums of each are averaged later, which divides by their number once more.
        if weighted and not _even(counts):
            total = add(counts)
            return [total / pipelines / number for number in counts]
        if not weighted:
            _warn_uneven(count, counts)
    return [len(microbatches) // pipelines] * len(microbatches)


def _counts(program: Program, count: Count, microbatches: Sequence[Any]) -> list[torch.Tensor]:
    return [
        microbatch.counts[program.counts.index(count)]
        if isinstance(microbatch, Counted)
        else _count(count, named_batch(program, microbatch, index))
        for index, microbatch in enumerate(microbatches)
    ]


def counts_of(program: Program, microbatch: Any) -> list[torch.Tensor]:
    """What others need to know of a microbatch, see `Counted`."""
    batch = named_batch(program, microbatch)
    return [_count(count, batch) for count in program.counts]


def _count(count: Count, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    names = [node.name for node in count.module.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        number: torch.Tensor = count.module.forward(*(batch[name] for name in names)).double()
        return number


def _even(counts: Sequence[torch.Tensor]) -> bool:
    """Whether all counts are known to be the same: a plain mean, which costs less. Other devices
    than the CPU would have to be waited for."""
    return all(
        number.device.type == "cpu" and float(number) == float(counts[0]) for number in counts
    )


def _refuse_nothing(count: Count, counts: Sequence[torch.Tensor], *, empty_is_zero: bool) -> None:
    """Looks at the CPU's counts alone."""
    empty = [i for i, number in enumerate(counts) if number.device.type == "cpu" and not number]
    if empty and not (empty_is_zero and len(empty) < len(counts)):
        raise ValueError(
            f"microbatch {empty[0]} has nothing to take the mean of (every target is ignored, or "
            f"the mask is empty): {count.line}; leave such rows out, or take fewer microbatches"
        )


def _warn_uneven(count: Count, counts: Sequence[torch.Tensor]) -> None:
    sizes = [float(number) for number in counts]
    if len(set(sizes)) > 1:
        warnings.warn(
            f"the microbatches count {sizes} in {count.line}, but the loss has other terms too: "
            "the mean of the microbatches' means is not the mean of the batch; divide sums by "
            'counts that the step is given, and pass loss_reduction="sum"',
            stacklevel=2,
        )


def loss_tangents(
    program: Program, divided: Sequence[Divisor], scale: float = 1.0
) -> list[dict[str, torch.Tensor]]:
    """For every microbatch, by port name, the gradient that `(loss / divisor * scale).backward()`
    sends into the loss."""
    ports = [port for port in program.ports(Role.TANGENT) if port.fqn == "loss"]
    tangents_of: dict[Any, dict[str, torch.Tensor]] = {}
    for by in divided if ports else ():
        # Equal numbers share a tangent. A tensor is a key by its identity: no device is waited for.
        if by not in tangents_of:
            ones = torch.ones(ports[0].shape, dtype=ports[0].dtype, device=ports[0].device)
            tangents_of[by] = {ports[0].name: over(ones * scale, by)}
    return [tangents_of[by] if ports else {} for by in divided]


def over(value: torch.Tensor, divisor: Divisor) -> torch.Tensor:
    """A microbatch's part of a result; nothing where it counts for nothing."""
    if isinstance(divisor, int):
        return value / divisor
    by = divisor.to(value.device)
    # a count of 0 makes the divisor infinite, and its loss may be nan
    return torch.where(by.isinf(), 0, value.double() / by).to(value.dtype)


def combined(values: Sequence[torch.Tensor], divided: Sequence[Divisor]) -> torch.Tensor:
    """Each divided by its divisor, then added in index order."""
    return add([over(value, by) for value, by in zip(values, divided, strict=True)])


def step_inputs(
    program: Program,
    batch: Mapping[str, Any],
    index: int,
    seed: int,
    tangents: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """The values of all ports of one microbatch but the state and the loss's tangent, by port
    name; `batch` is as `named_batch` gives it."""
    values = dict(batch)
    sizes = {port.name: values[port.name] for port in program.ports(Role.SIZE)}
    for port in program.ports(Role.SEED):
        values[port.name] = torch.tensor(mix(seed, index))
    for port in program.ports(Role.TANGENT):
        if port.fqn == "loss":
            continue
        if tangents is None or port.fqn not in tangents:
            raise ValueError(
                f"microbatch {index}: the loss is outside, so pass a tangent of {port.fqn}"
            )
        where = f"microbatch {index}, tangent of {port.fqn}"
        check_tensor(port, tangents[port.fqn], where, sizes)
        values[port.name] = tangents[port.fqn]
    return values


def evaluate(
    program: Program,
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
    parts = [
        _one_pipeline(
            program,
            state,
            microbatches,
            tangents,
            seed,
            range(start, start + per_replica),
            divided,
            scale,
        )
        for start in range(0, count, per_replica)
    ]
    statistics = tuple(figures for part in parts for figures in part.statistics)
    sizes = _sizes(program, microbatches[0])
    if len(parts) == 1:
        return with_statistics(program, parts[0], statistics, sizes)
    losses = [part.loss for part in parts if part.loss is not None]
    together = mean if program.averages else add
    return Result(
        loss=together(losses) if losses else None,
        outputs=tuple(output for part in parts for output in part.outputs),
        gradients={
            name: together([part.gradients[name] for part in parts]) for name in parts[0].gradients
        },
        buffers=with_statistics(program, parts[0], statistics, sizes).buffers,
        batch_gradients=averaged(
            program, tuple(grads for part in parts for grads in part.batch_gradients)
        ),
    )


def with_statistics(
    program: Program,
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
    program: Program, gradients: tuple[dict[str, torch.Tensor], ...]
) -> tuple[dict[str, torch.Tensor], ...]:
    """Gradients of batch inputs of every replica's own loss, as those of the mean loss."""
    if not program.averages:
        return gradients
    return tuple(
        {n: g / program.replicas for n, g in microbatch.items()} for microbatch in gradients
    )


def add(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum, added in order."""
    return functools.reduce(torch.add, values)


def mean(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Added in order, then divided by their number."""
    return add(values) / len(values)


def _one_pipeline(
    program: Program,
    state: State,
    microbatches: Sequence[Any],
    tangents: Sequence[Mapping[str, torch.Tensor]] | None,
    seed: int,
    indices: range,
    divided: Sequence[Divisor],
    scale: float,
) -> Result:
    held = {port.name: as_computed(port, state[port.fqn]) for port in program.ports(*STATE_ROLES)}
    arriving = loss_tangents(program, divided, scale)
    slots = {port.fqn: port.name for port in program.ports(Role.BUFFER)}
    losses, outputs, batch_gradients = [], [], []
    sums: dict[str, torch.Tensor] = {}
    updated: dict[str, torch.Tensor] = {}
    once, statistics = tracked_names(program), []
    for index in indices:
        batch = named_batch(program, microbatches[index], index)
        output_tangents = tangents[index] if tangents is not None else None
        values = held | arriving[index] | step_inputs(program, batch, index, seed, output_tangents)
        with torch.no_grad(), _torch.no_autocast():
            results = program.module(*(values[port.name] for port in program.inputs))
        outputs.append({port.fqn: results[port.name] for port in program.ports(Role.OUTPUT)})
        batch_gradients.append(
            {port.fqn: results[port.name] for port in program.ports(Role.BATCH_GRADIENT)}
        )
        losses += [results[port.name] for port in program.ports(Role.LOSS)]
        statistics.append(
            {p.fqn: results[p.name] for p in program.ports(Role.BUFFER_UPDATE) if p.fqn in once}
        )
        for port in program.ports(Role.BUFFER_UPDATE):
            if port.fqn not in once:  # the next microbatch reads what this one has written
                held[slots[port.fqn]] = updated[port.fqn] = results[port.name]
        for port in program.ports(Role.GRADIENT):
            before = sums.get(port.name)
            value = results[port.name]
            sums[port.name] = value if before is None else before + value
    # What several stages give to one gradient is added at the end, each stage's microbatches first:
    # so do ranks, in a reduction.
    gradients: dict[str, torch.Tensor] = {}
    for port in program.ports(Role.GRADIENT):
        part = sums[port.name]
        gradients[port.fqn] = gradients[port.fqn] + part if port.fqn in gradients else part
    return Result(
        loss=combined(losses, divided[indices.start : indices.stop]) if losses else None,
        outputs=tuple(outputs),
        gradients=gradients,
        buffers=updated | {name: state[name] for name in once},  # of before, see with_statistics
        batch_gradients=tuple(batch_gradients),
        statistics=tuple(statistics),
    )
