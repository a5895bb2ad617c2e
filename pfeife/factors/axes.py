"""Where each dimension of an operand goes, as functions of an operation's arguments and a shape.

permute([1, 0, 2])    0 1 2 -> 1 0 2
select(1, i)          0 1 2 -> 0 - 1      the one that is picked from is nowhere
sum(1)                0 1 2 -> 0 - 1
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class Arguments(Protocol):
    """An operation with its arguments by the names of the schema."""

    @property
    def name(self) -> str:
        """What it is called, without its overload."""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """By the names of the schema, defaults included."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its result, or of the first of several."""


# Where each dimension of an operand with such a shape is in the result, None where it is nowhere.
Axes = Callable[[Any, tuple[int, ...]], Sequence[int | None]]


def permuted(operation: Arguments, shape: tuple[int, ...]) -> Sequence[int | None]:
    """permute."""
    order = [dim % len(shape) for dim in operation.arguments["dims"]]
    return [order.index(dim) for dim in range(len(shape))]


def transposed(operation: Arguments, shape: tuple[int, ...]) -> Sequence[int | None]:
    """transpose, and t, which also takes vectors."""
    places = list(range(len(shape)))
    if operation.name == "t":
        return places[::-1]
    a, b = operation.arguments["dim0"], operation.arguments["dim1"]
    places[a], places[b] = places[b], places[a]
    return places


def unsqueezed(operation: Arguments, shape: tuple[int, ...]) -> Sequence[int | None]:
    """unsqueeze: those from the new one on are one place further."""
    new = operation.arguments["dim"] % len(operation.shape)
    return [dim + (new <= dim) for dim in range(len(shape))]


def squeezed(operation: Arguments, shape: tuple[int, ...]) -> Sequence[int | None]:
    """squeeze: those of size 1 are gone."""
    return _without({dim for dim in dims_of(operation, len(shape)) if shape[dim] == 1}, shape)


def picked(operation: Arguments, shape: tuple[int, ...]) -> Sequence[int | None]:
    """A slice or an item of a dimension, unless it is the whole of it."""
    dim = operation.arguments["dim"] % len(shape)
    if operation.name in ("select", "unbind"):
        return _without({dim}, shape)
    if operation.name == "slice" and operation.shape[dim] == shape[dim]:
        return range(len(shape))
    return _in_place({dim}, shape)


def reduced(operation: Arguments, shape: tuple[int, ...]) -> Sequence[int | None]:
    """A reduction: over which it is, those are gone, or of size 1."""
    over = dims_of(operation, len(shape))
    return (_in_place if operation.arguments.get("keepdim") else _without)(over, shape)


def along(operation: Arguments, shape: tuple[int, ...]) -> Sequence[int | None]:
    """softmax, cumsum, sort: along which it is, there one place looks at another."""
    return _in_place(dims_of(operation, len(shape)), shape)


def dims_of(operation: Arguments, rank: int) -> set[int]:
    """The dimensions in an operation's `dim` or `dims`, counted from the front; all if there are
    none."""
    dims = operation.arguments.get("dim", operation.arguments.get("dims"))
    if dims is None or dims == []:
        return set(range(rank))
    return {d % max(rank, 1) for d in (dims if isinstance(dims, list | tuple) else [dims])}


def _in_place(gone: set[int], shape: tuple[int, ...]) -> Sequence[int | None]:
    """All but some dimensions are where they were."""
    return [None if dim in gone else dim for dim in range(len(shape))]


def _without(gone: set[int], shape: tuple[int, ...]) -> Sequence[int | None]:
    """All but some dimensions close up."""
    before = [sum(other < dim for other in gone) for dim in range(len(shape))]
    return [None if dim in gone else dim - n for dim, n in enumerate(before)]
