"""Sizes of the arguments that a caller declares: those to plan for, and the most that they may be.

max_sizes={"tokens": {1: 512}}     tokens [rows, a] -> a = 512, the rows as captured
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from pfeife import _torch
from pfeife.frontend.batch import Leaf
from pfeife.frontend.captured import Captured
from pfeife.ir.parts import Port
from pfeife.ir.sizes import broken_limit, captured_sizes

Sizes = Mapping[str, Mapping[int, int]]  # by the names of arguments and by dimensions


def check_sizes(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    """A validator of options. Raises ValueError for what are no sizes."""
    if not isinstance(value, Mapping) or not all(map(_are_sizes, value.values())):
        raise ValueError(
            f"option {attribute.name}={value!r}: must be sizes by the names of arguments and by "
            'dimensions, such as {"tokens": {1: 512}}'
        )


def _are_sizes(dims: Any) -> bool:
    if not isinstance(dims, Mapping):
        return False
    return all(type(one) is int and one >= 0 for pair in dims.items() for one in pair)


def mark_declared(leaves: Iterable[Leaf], *declared: Sizes) -> None:
    """Marks what the first microbatch has of a call's tensors: the declared sizes are open. Raises
    ValueError for an argument or a dimension that there is not."""
    tensors = {leaf.name: leaf.first for leaf in leaves}
    for name, dims in ((name, dims) for sizes in declared for name, dims in sizes.items()):
        tensor = tensors.get(name)
        if tensor is None or max(dims, default=0) >= tensor.dim():
            known = {name: [*one.shape] for name, one in tensors.items()}
            raise ValueError(
                f"max_sizes and sizes_hint: {name} has no dimension {max(dims, default=0)} among "
                f"the tensors of this call, whose microbatches are {known}"
            )
        _torch.mark_open(tensor, dims)


def with_marks(declared: Sizes, captured: Captured, args: Sequence[Any]) -> Sizes:
    """Declared sizes, and those that `mark_dynamic(max=)` has declared on the arguments of a
    call."""
    found = dict(declared)
    for port, value in zip(captured.ports, args, strict=True):
        if port is not None and isinstance(value, torch.Tensor):
            found[port.fqn] = {**found.get(port.fqn, {}), **_torch.marked_most(value)}
    return found


def declared_sizes(captured: Captured, declared: Sizes, count: int) -> dict[str, int]:
    """The size ports of a program where its arguments, of so many microbatches, have the declared
    sizes, and else those of its capture. These alone if the program is for no such sizes."""
    program = captured.program
    before = captured_sizes(program)
    found = dict(before)
    for port in program.inputs:
        for dim, size in declared.get(port.fqn, {}).items():
            name = _name(port, dim)
            if name in found:
                found[name] = size // count if dim == port.batch_dim else size
    return before if broken_limit(program, found) else found


def _name(port: Port, dim: int) -> str:
    """The size port that is a dimension of an input, "" if none is."""
    sizes = port.sizes or ()
    return str(sizes[dim]) if dim < len(sizes) else ""
