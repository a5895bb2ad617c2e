"""Rules for views, slices, joins, tables and indices."""

import math
from collections.abc import Sequence

import attrs
from torch import fx

from pfeife.frontend.rows.elements import fixed, sizes
from pfeife.frontend.rows.value import (
    FIXED,
    RowOperation,
    Rows,
    Stuck,
    moves,
    shape_of,
)
from pfeife.ir.nodes import bound, operation_name


def reshaped(operation: RowOperation) -> Rows:
    """In row-major order the rows stay where they are, whatever the shape: `place` blocks, each
    with all rows one after the other.

        [2][4 rows][6]    place 2
        [8][6]            dimension 0 has 2 times the rows (`before`) times 1
        [2][12][2]        dimension 1 has 1 times the rows times 3
    """
    (source, rows), *_ = operation.operands()
    if rows.dim is None:
        return rows
    shape, new = shape_of(source), operation.shape
    place = math.prod(shape[: rows.dim]) * rows.before
    possible = [
        (dim, place // before)
        for dim in range(len(new))
        for before in [math.prod(new[:dim])]
        if place % before == 0 and before * new[dim] % (place * operation.rows) == 0
    ]
    if not possible:
        raise Stuck
    same = [(d, b) for d, b in possible if new[d] == shape[rows.dim]]
    if operation.rows == 1 and len(possible) > 1:  # a dimension of 1 may be that of the row, or not
        same = _grown(operation, possible)
    dim, before = (same or possible)[0]
    return attrs.evolve(rows, dim=dim, before=before)


def _grown(operation: RowOperation, possible: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those of the possible dimensions that are larger for twice the rows."""
    if operation.twin is None:
        raise Stuck(numbers=True)
    twice = attrs.evolve(operation, node=operation.twin).shape
    return [(dim, before) for dim, before in possible if twice[dim] != operation.shape[dim]]


def expanded(operation: RowOperation) -> Rows:
    """expand and repeat along other dimensions than that of the rows."""
    (source, rows), *_ = operation.operands()
    shape = shape_of(source)
    maybe = rows.maybe | _new_sizes(operation, shape)
    if rows.dim is None:
        return attrs.evolve(rows, maybe=maybe)
    dim = rows.dim + len(operation.shape) - len(shape)
    if operation.shape[dim] != shape[rows.dim]:
        raise Stuck
    return attrs.evolve(rows, dim=dim, maybe=maybe)


def _new_sizes(operation: RowOperation, before: Sequence[int]) -> frozenset[int]:
    """What the sizes that an expansion makes may count."""
    old = (1,) * (len(operation.shape) - len(before)) + tuple(before)
    # A size that is the same for twice the rows counts none of them; without a twin all may.
    twice = shape_of(operation.twin) if operation.twin else (0,) * len(operation.shape)
    grown = [
        new
        for new, size, more in zip(operation.shape, old, twice, strict=True)
        if new not in (size, more)
    ]
    return sizes(grown, operation.rows)


def joined(operation: RowOperation) -> Rows:
    """cat and stack in another dimension than that of the rows."""
    operands = [(n, r) for n, r in operation.operands() if math.prod(shape_of(n))]
    moving = [rows for _, rows in operands if moves(rows)]
    if not moving:
        return fixed(operation)
    dim = operation.arguments["dim"] % len(operation.shape)
    places = {(rows.dim, rows.before, rows.power) for rows in moving}
    # A sum beside what is the same in every microbatch is neither a sum nor a mean. Rows may stand
    # beside it, since they are joined.
    alone = moving[0].dim is None or moving[0].power != 0
    if len(places) != 1 or (alone and len(moving) != len(operands)):
        raise Stuck
    first = moving[0]
    maybe = frozenset[int]().union(*(rows.maybe for _, rows in operands))
    if first.dim is None:
        counts = frozenset().union(*(rows.counts for rows in moving))
        return attrs.evolve(
            first, maybe=maybe, counts=counts, plain=any(rows.plain for rows in moving)
        )
    if operation.name == "stack":
        return attrs.evolve(first, maybe=maybe, dim=first.dim + (dim <= first.dim))
    if dim == first.dim:
        raise Stuck
    return attrs.evolve(first, maybe=maybe)


def padded(operation: RowOperation) -> Rows:
    """constant_pad_nd of other dimensions than that of the rows."""
    (_, rows), *_ = operation.operands()
    if rows.dim is None or (rows.power and operation.arguments["value"]):
        raise Stuck
    # `pad` has two numbers for each dimension and begins with the last one.
    at = 2 * (len(operation.shape) - 1 - rows.dim)
    if any(operation.arguments["pad"][at : at + 2]):
        raise Stuck
    return rows


def written(operation: RowOperation) -> Rows:
    """slice_scatter, select_scatter: a part of a tensor, in another dimension than that of the
    rows, with other values."""
    base, part = operation.of("self"), operation.of("src")
    if (
        operation.name == "slice_scatter"
        and shape_of(operation.arguments["src"]) == operation.shape
    ):
        return part  # nothing is left of the tensor
    dim = operation.arguments["dim"] % len(operation.shape)
    if part.dim is not None and operation.name == "select_scatter":
        part = attrs.evolve(part, dim=part.dim + (dim <= part.dim))
    return _in_one_place((base, part), dim)


def copied(operation: RowOperation) -> Rows:
    """A tensor's values replaced by another's."""
    rows = operation.of("src")
    if moves(rows) and shape_of(operation.arguments["src"]) != operation.shape:
        raise Stuck
    return rows


def like(operation: RowOperation) -> Rows:
    """A new tensor as large as another: as many rows."""
    (_, rows), *_ = operation.operands()
    if rows.dim is None:
        return FIXED
    return attrs.evolve(rows, power=0, maybe=frozenset())


def drawn(operation: RowOperation) -> Rows:
    """Random numbers, as many as a tensor has, of a distribution with the same figures in every
    microbatch."""
    names = ("from", "to", "mean", "std", "lambd")
    figures = [operation.number(name) for name in names if name in operation.arguments]
    if any(moves(figure) for figure in figures):
        raise Stuck
    maybe = frozenset[int]().union(*(figure.maybe for figure in figures))
    return attrs.evolve(like(operation), maybe=maybe)


def looked_up(operation: RowOperation) -> Rows:
    """embedding: a table, and indices that have rows."""
    table, indices = operation.of("weight"), operation.of("indices")
    if moves(table) or indices.dim is None or indices.power:
        raise Stuck
    return attrs.evolve(indices, maybe=table.maybe)


def gathered(operation: RowOperation) -> Rows:
    """gather and scatter along another dimension than that of the rows."""
    dim = operation.arguments["dim"] % len(operation.shape)
    return _in_one_place([rows for _, rows in operation.operands()], dim)


def _in_one_place(operands: Sequence[Rows], along: int) -> Rows:
    """The rows that several operands have, all in one dimension, other than the one `along` which
    something is done with them."""
    places = {(rows.dim, rows.before, rows.power) for rows in operands if moves(rows)}
    if len(places) != 1:
        raise Stuck
    ((place, before, power),) = places
    if place in (None, along):
        raise Stuck
    maybe = frozenset[int]().union(*(rows.maybe for rows in operands))
    return Rows(True, place, before, power, maybe)


def indexed(operation: RowOperation) -> Rows:
    """x[i, j]: indices into a table, into other dimensions, or row by row (x[arange(rows), i])."""
    table, indices = operation.of("self"), operation.arguments["indices"]
    pairs = [(at, index) for at, index in enumerate(indices) if index is not None]
    places = [at for at, _ in pairs]
    # Where indices are not side by side (x[i, :, j]), torch puts what they pick in front.
    if not pairs or places != list(range(places[0], places[0] + len(places))):
        raise Stuck
    width = max(len(shape_of(index)) for _, index in pairs)
    indexed_by = [(len(shape_of(index)), operation.rows_of[index]) for _, index in pairs]
    row_places = {
        (rows.dim + width - rank, rows.before) for rank, rows in indexed_by if rows.dim is not None
    }
    sums = any(rows.varies and rows.dim is None for _, rows in indexed_by)
    if sums or len(row_places) > 1:
        raise Stuck
    if table.dim is None and not table.varies and row_places:
        ((dim, before),) = row_places
        return Rows(True, places[0] + dim, before, table.power, table.maybe)
    if table.dim is None or table.before != 1 or table.power:
        raise Stuck
    if table.dim in places:
        return _row_by_row(operation, table, pairs, row_places, width)
    if row_places:
        raise Stuck
    dim = table.dim + (width - len(places) if places[0] < table.dim else 0)
    return Rows(True, dim, maybe=table.maybe)


def _row_by_row(
    operation: RowOperation, table: Rows, pairs: list, row_places: set, width: int
) -> Rows:
    """The index of the rows' dimension counts the rows, so that row stays with row."""
    index = dict(pairs)[table.dim]
    shape = shape_of(index)
    places = [at + width - len(shape) for at, size in enumerate(shape) if size == operation.rows]
    if not _counts_rows(index, operation.rows) or table.dim is None or not places:
        raise Stuck
    if table.dim != pairs[0][0] or row_places - {(places[0], 1)}:
        raise Stuck
    return Rows(True, table.dim + places[0], maybe=table.maybe)


def _counts_rows(index: fx.Node, rows: int) -> bool:
    """Whether an index is arange(rows), seen in whatever shape."""
    if math.prod(shape_of(index)) != rows:
        return False
    while operation_name(index) in ("view", "unsqueeze", "reshape", "_to_copy", "clone", "permute"):
        index = index.args[0]  # type: ignore[assignment]
    values = bound(index)
    return operation_name(index) == "arange" and (values.get("start") or 0, values["end"]) == (
        0,
        rows,
    )
