"""One microbatch of a program: its tensors by the names of ports, its sizes, and what it counts."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from pfeife.ir.parts import Count, Port, ProgramBase, Role
from pfeife.ir.seeding import mix
from pfeife.ir.sizes import broken_limit, sizes_in


@attrs.frozen(eq=False)
class Counted:
    """A microbatch of which another process has told what it counts: the values of the program's
    `counts`, in their order; and what of it this process has, if anything."""

    counts: Sequence[torch.Tensor]
    microbatch: Any = None


def named_batch(program: ProgramBase, microbatch: Any, index: int = 0) -> dict[str, Any]:
    """The batch ports' tensors of one microbatch and the values of the size ports, checked.

    A microbatch is a mapping from names (also of sizes that its shapes do not tell), or what the
    step was captured with: its tensors in their order (a tuple of the arguments, or a single
    argument).
    """
    ports = program.ports(Role.BATCH)
    if isinstance(microbatch, Counted):
        microbatch = microbatch.microbatch
    # By name if it has all the names; a step that was captured with a dict of its own is cut as the
    # capture saw it, by the order of the tensors in it.
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
    # A kernel, or a branch of Python, was chosen for the sizes of the capture: at sizes that break
    # what was assumed then, the graph would compute something else without a word.
    broken = broken_limit(program, sizes)
    if broken:
        raise ValueError(
            f"microbatch {index} has the sizes {sizes}, and the program was captured for {broken}: "
            "capture another one for such sizes"
        )
    return named | sizes


def sizes_of(program: ProgramBase, microbatch: Any) -> dict[str, int]:
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


def step_inputs(
    program: ProgramBase,
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


def counts_of(program: ProgramBase, microbatch: Any) -> list[torch.Tensor]:
    """What others need to know of a microbatch, see `Counted`."""
    batch = named_batch(program, microbatch)
    return [count_of(count, batch) for count in program.counts]


def count_of(count: Count, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """How much a microbatch counts in a mean: a scalar in float64."""
    names = [node.name for node in count.module.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        number: torch.Tensor = count.module.forward(*(batch[name] for name in names)).double()
        return number


def rows_and_tokens(program: ProgramBase) -> tuple[int, int]:
    """The rows of a microbatch, and the elements of its first tensor of integers that has rows and
    further dimensions; 0 where there are none."""
    cut = [port for port in program.ports(Role.BATCH) if port.batch_dim is not None]
    rows = min((port.shape[port.batch_dim or 0] for port in cut), default=0)
    return rows, next((math.prod(port.shape) for port in cut if _has_tokens(port)), 0)


def _has_tokens(port: Port) -> bool:
    whole = not port.dtype.is_floating_point and port.dtype != torch.bool
    return whole and len(port.shape) > 1
