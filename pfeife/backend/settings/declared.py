"""Sizes of the arguments that a caller declares: those to plan for, and the most that they may be.

max_sizes={"tokens": {1: 512}}     tokens [rows, a] -> a = 512, the rows as captured
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from pfeife import _torch
from pfeife.backend.settings.option_checks import must_be
from pfeife.frontend.batch import Leaf
from pfeife.frontend.captured import Captured
from pfeife.ir.parts import Port, captured_sizes
from pfeife.ir.sizes import broken_limit

Sizes = Mapping[str, Mapping[int, int]]  # by the names of arguments and by dimensions


def _are_sizes(declared: Any) -> bool:
    sizes: list[Any] = list(declared.values()) if isinstance(declared, Mapping) else [None]
    if not all(isinstance(dims, Mapping) for dims in sizes):
        return False
    numbers = [number for dims in sizes for pair in dims.items() for number in pair]
    return all(type(number) is int and number >= 0 for number in numbers)


check_sizes = must_be(
    'sizes by the names of arguments and by dimensions, such as {"tokens": {1: 512}}',
    when=_are_sizes,
)


def mark_declared(leaves: Iterable[Leaf], *declared: Sizes) -> None:
    """Marks what the first microbatch has of a call's tensors: the declared sizes are open. Raises
    ValueError for an argument or a dimension that there is not."""
    tensors = {leaf.name: leaf.first for leaf in leaves}
    for name, dims in ((name, dims) for sizes in declared for name, dims in sizes.items()):
        tensor = tensors.get(name)
        if tensor is None or max(dims, default=0) >= tensor.dim():
            shapes = {name: [*tensor.shape] for name, tensor in tensors.items()}
            raise ValueError(
                f"max_sizes and sizes_hint: {name} has no dimension {max(dims, default=0)} among "
                f"the tensors of this call, whose microbatches are {shapes}"
            )
        _torch.mark_open(tensor, dims)


def with_marks(declared: Sizes, captured: Captured, args: Sequence[Any]) -> Sizes:
    """Declared sizes, and those that `mark_dynamic(max=)` has declared on the arguments of a
    call."""
    sizes = dict(declared)
    for port, value in zip(captured.ports, args, strict=True):
        if port is not None and isinstance(value, torch.Tensor):
            sizes[port.fqn] = {**sizes.get(port.fqn, {}), **_torch.marked_most(value)}
    return sizes


def declared_sizes(captured: Captured, declared: Sizes, count: int) -> dict[str, int]:
    """The size ports of a program where its arguments, of so many microbatches, have the declared
    sizes, and else those of its capture. These alone if the program is for no such sizes."""
    program = captured.program
    before = captured_sizes(program)
    sizes = dict(before)
    for port in program.inputs:
        for dim, size in declared.get(port.fqn, {}).items():
            name = _name(port, dim)
            if name in sizes:
                sizes[name] = size // count if dim == port.batch_dim else size
    # Of those that members cut, the next smaller one that they divide.
    for size, number in _torch.divisors(program.limits).items():
        sizes[str(size)] -= sizes[str(size)] % number
    # What is declared may be beyond what the program holds for: then it is built for its capture.
    return before if broken_limit(program, sizes) else sizes


def _name(port: Port, dim: int) -> str:
    """The size port that is a dimension of an input, "" if none is."""
    sizes = port.sizes or ()
    return str(sizes[dim]) if dim < len(sizes) else ""
