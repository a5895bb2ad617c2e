"""Rules of operations that only say where each dimension of their first operand goes.

    permute([1, 0, 2])    0 1 2 -> 1 0 2      the rows are where their dimension is
    select(1, i)          0 1 2 -> 0 - 1      in the one that is picked there can be none
    sum(1)                0 1 2 -> 0 + 1      over them it is a sum, elsewhere they stay

An operation is one function of these places (`Axes`), and what it makes of the values decides which
of `moved`, `each_row` and `totalled` is its rule.
"""

from collections.abc import Callable, Sequence

import attrs

from pfeife.frontend.rows.value import RowOperation, Rows, Rule, Stuck, shape_of

# Where each dimension of an operand with such a shape is in the result, None where it is nowhere.
Axes = Callable[[RowOperation, tuple[int, ...]], Sequence[int | None]]


def moved(axes: Axes) -> Rule:
    """The rule of an operation that leaves the values as they are, sums and means too."""

    def rule(operation: RowOperation) -> Rows:
        (source, rows), *_ = operation.operands()
        if rows.dim is None:
            return rows
        place = axes(operation, shape_of(source))[rows.dim]
        if place is None:
            raise Stuck
        return attrs.evolve(rows, dim=place)

    return rule


def each_row(axes: Axes) -> Rule:
    """The rule of any function of each row by itself: of sums or means nothing is known."""

    def rule(operation: RowOperation) -> Rows:
        (source, rows), *_ = operation.operands()
        if rows.dim is None:
            raise Stuck
        place = axes(operation, shape_of(source))[rows.dim]
        if place is None or rows.power:
            raise Stuck(mixes=place is None and "softmax" in operation.name)
        return attrs.evolve(rows, dim=place, maybe=frozenset())

    return rule


def totalled(*, mean: bool) -> Rule:
    """The rule of a sum, which over the dimension of the rows grows with them, or of a mean, which
    is there one over all rows."""
    elsewhere = moved(reduced)

    def rule(operation: RowOperation) -> Rows:
        (source, rows), *_ = operation.operands()
        if rows.dim not in dims_of(operation, len(shape_of(source))):
            return elsewhere(operation)
        return Rows(rows.varies, power=rows.power + (not mean), maybe=rows.maybe, plain=mean)

    return rule


def permuted(operation: RowOperation, shape: tuple[int, ...]) -> Sequence[int | None]:
    """permute."""
    order = [dim % len(shape) for dim in operation.arguments["dims"]]
    return [order.index(dim) for dim in range(len(shape))]


def transposed(operation: RowOperation, shape: tuple[int, ...]) -> Sequence[int | None]:
    """transpose, and t, which also takes vectors."""
    places = list(range(len(shape)))
    if operation.name == "t":
        return places[::-1]
    a, b = operation.arguments["dim0"], operation.arguments["dim1"]
    places[a], places[b] = places[b], places[a]
    return places


def unsqueezed(operation: RowOperation, shape: tuple[int, ...]) -> Sequence[int | None]:
    """unsqueeze: those from the new one on are one place further."""
    new = operation.arguments["dim"] % len(operation.shape)
    return [dim + (new <= dim) for dim in range(len(shape))]


def squeezed(operation: RowOperation, shape: tuple[int, ...]) -> Sequence[int | None]:
    """squeeze: those of size 1 are gone."""
    return _without({dim for dim in dims_of(operation, len(shape)) if shape[dim] == 1}, shape)


def picked(operation: RowOperation, shape: tuple[int, ...]) -> Sequence[int | None]:
    """A slice or an item of a dimension, unless it is the whole of it."""
    dim = operation.arguments["dim"] % len(shape)
    if operation.name in ("select", "unbind"):
        return _without({dim}, shape)
    if operation.name == "slice" and operation.shape[dim] == shape[dim]:
        return range(len(shape))
    return _in_place({dim}, shape)


def reduced(operation: RowOperation, shape: tuple[int, ...]) -> Sequence[int | None]:
    """A reduction: over which it is, those are gone, or of size 1."""
    over = dims_of(operation, len(shape))
    return (_in_place if operation.arguments.get("keepdim") else _without)(over, shape)


def along(operation: RowOperation, shape: tuple[int, ...]) -> Sequence[int | None]:
    """softmax, cumsum, sort: along which it is, there one place looks at another."""
    return _in_place(dims_of(operation, len(shape)), shape)


def dims_of(operation: RowOperation, rank: int) -> set[int]:
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
