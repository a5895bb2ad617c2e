"""The arguments of an operation on a member's part of what it reads."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from pfeife.factors.equation import Equation, Label, tensors_of
from pfeife.factors.recipes import computed
from pfeife.ir.nodes import bound, sizes_of, source_line

aten = torch.ops.aten
Make = Callable[..., fx.Node]  # a node of a target and arguments


def localised(
    make: Make, node: fx.Node, equation: Equation, label: Label, members: int, *given: Any
) -> tuple[Any, Any]:
    """The `given` args and kwargs, of which some may be sizes of the result: those of a member's
    part along a factor."""
    args, kwargs = given
    local: dict[str, Any] = {}
    place = equation.place(equation.results[0], label)
    by_name = named(node, args, kwargs)
    if equation.shape is not None and place is not None:
        sizes = [*by_name[equation.shape]]
        sizes[place.dim] = _share(make, sizes[place.dim], members)
        local[equation.shape] = sizes
    for name, counted in equation.counts.items():
        if counted == label:
            local[name] = _share(make, by_name[name], members)
    names = _names(node)
    args = tuple(local.get(name, value) for name, value in zip(names, args, strict=False))
    return args, {name: local.get(name, value) for name, value in kwargs.items()}


def own_and_whole(
    make: Make,
    node: fx.Node,
    equation: Equation,
    label: Label,
    members: int,
    arguments: Mapping[str, Any],
) -> tuple[Any, Any]:
    """How large a member's part of a factor is, and the whole of it: of an open size nodes, by what
    its `arguments` have. Raises ValueError where none of these has it as a dimension."""
    size = equation.sizes[label]
    if isinstance(size, int):
        return size // members, size
    read, whole = tensors_of(node), bound(node)
    for name, own in arguments.items():
        dims = equation.operands[read.index(whole[name])] if whole[name] in read else ()
        if (label,) in dims:
            part = make(aten.sym_size.int, own, dims.index((label,)))
            return part, make(operator.mul, part, members)
    raise ValueError(f"shard: no operand of {node.target} tells a size ({source_line(node)})")


def _share(make: Make, size: Any, members: int) -> Any:
    """A member's share of a size, or of each of several; one may be computed, or -1, which is what
    is left."""
    if isinstance(size, list | tuple):
        return [_share(make, each, members) for each in size]
    return size if size == -1 else computed(make, operator.floordiv, size, members)


def squeezed(node: fx.Node) -> list[int]:
    """The dimensions that a squeeze takes away; of a part more may be of size 1."""
    sizes = sizes_of(node.args[0])  # type: ignore[arg-type]
    dims = bound(node).get("dim", range(len(sizes)))
    dims = [dims] if isinstance(dims, int) else dims
    return [dim for dim in dims if sizes[dim] == 1]


def named(node: fx.Node, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by the names in the operation's schema."""
    return dict(zip(_names(node), args, strict=False)) | kwargs


def _names(node: fx.Node) -> list[str]:
    """The names of an operation's arguments, in their order."""
    return [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
