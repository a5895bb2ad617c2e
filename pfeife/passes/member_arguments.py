"""The arguments of an operation on a member's part of what it reads."""

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from pfeife.factors.equation import Equation, Label
from pfeife.ir.nodes import bound, sizes_of

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


def _share(make: Make, size: Any, members: int) -> Any:
    """A member's share of a size, or of each of several; one may be computed, or -1, which is what
    is left."""
    if isinstance(size, list | tuple):
        return [_share(make, each, members) for each in size]
    if isinstance(size, fx.Node):
        return make(operator.floordiv, size, members)
    return size if size == -1 else size // members


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
