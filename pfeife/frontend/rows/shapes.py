"""Rules for views, slices, joins, tables and indices."""

import math
from collections.abc import Callable, Sequence

import attrs
from torch import fx

from pfeife.frontend.rows.elements import dims_of, fixed, sizes
from pfeife.frontend.rows.value import (
    FIXED,
    RowOperation,
    Rows,
    Rule,
    Stuck,
    bound,
    moves,
    operation,
    shape_of,
)


def reshaped(one: RowOperation) -> Rows:
    """In row-major order the rows stay where they are, whatever the shape: `place` blocks, each
    with all rows one after the other.

        [2][4 rows][6]    place 2
        [8][6]            dimension 0 has 2 times the rows (`before`) times 1
        [2][12][2]        dimension 1 has 1 times the rows times 3
    """
    (source, rows), *_ = one.operands()
    if rows.dim is None:
        return rows
    shape, new = shape_of(source), one.shape
    place = math.prod(shape[: rows.dim]) * rows.before
    possible = [
        (dim, place // before)
        for dim in range(len(new))
        for before in [math.prod(new[:dim])]
        if place % before == 0 and before * new[dim] % (place * one.rows) == 0
    ]
    if not possible:
        raise Stuck
    same = [(d, b) for d, b in possible if new[d] == shape[rows.dim]]
    if one.rows == 1 and len(possible) > 1:  # a dimension of 1 may be that of the row, or not
        same = _grown(one, possible)
    dim, before = (same or possible)[0]
    return attrs.evolve(rows, dim=dim, before=before)


def _grown(one: RowOperation, possible: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those of the possible dimensions that are larger for twice the rows."""
    if one.twin is None:
        raise Stuck(numbers=True)
    twice = attrs.evolve(one, node=one.twin).shape
    return [(dim, before) for dim, before in possible if twice[dim] != one.shape[dim]]


def moved(order: Callable[[RowOperation, int], Sequence[int]]) -> Rule:
    def rule(one: RowOperation) -> Rows:
        (source, rows), *_ = one.operands()
        if rows.dim is None:
            return rows
        places = list(order(one, len(shape_of(source))))
        return attrs.evolve(rows, dim=places.index(rows.dim))

    return rule


def permuted(one: RowOperation, rank: int) -> Sequence[int]:
    return [d % rank for d in one.arguments["dims"]]


def transposed(one: RowOperation, rank: int) -> Sequence[int]:
    order = list(range(rank))
    if one.name == "t":
        return order[::-1]
    a, b = one.arguments["dim0"] % rank, one.arguments["dim1"] % rank
    order[a], order[b] = order[b], order[a]
    return order


def unsqueezed(one: RowOperation) -> Rows:
    (_, rows), *_ = one.operands()
    if rows.dim is None:
        return rows
    new = one.arguments["dim"] % len(one.shape)
    return attrs.evolve(rows, dim=rows.dim + (new <= rows.dim))


def squeezed(one: RowOperation) -> Rows:
    (source, rows), *_ = one.operands()
    if rows.dim is None:
        return rows
    shape = shape_of(source)
    gone = {d for d in dims_of(one, len(shape)) if shape[d] == 1}
    if rows.dim in gone:
        raise Stuck
    return attrs.evolve(rows, dim=rows.dim - sum(d < rows.dim for d in gone))


def expanded(one: RowOperation) -> Rows:
    (source, rows), *_ = one.operands()
    if rows.dim is None:
        return attrs.evolve(rows, maybe=rows.maybe | _new_sizes(one, shape_of(source)))
    dim = rows.dim + len(one.shape) - len(shape_of(source))
    if one.shape[dim] != shape_of(source)[rows.dim]:
        raise Stuck
    return attrs.evolve(rows, dim=dim, maybe=rows.maybe | _new_sizes(one, shape_of(source)))


def _new_sizes(one: RowOperation, before: Sequence[int]) -> frozenset[int]:
    """What the sizes that an expansion makes may count."""
    old = (1,) * (len(one.shape) - len(before)) + tuple(before)
    twice = shape_of(one.twin) if one.twin else (0,) * len(one.shape)
    grown = [
        new
        for new, size, more in zip(one.shape, old, twice, strict=True)
        if new not in (size, more)
    ]
    return sizes(grown, one.rows)


def picked(one: RowOperation) -> Rows:
    """A slice or an item of a dimension that is not that of the rows, or the whole of it."""
    (source, rows), *_ = one.operands()
    if rows.dim is None:
        return rows
    shape = shape_of(source)
    dim = one.arguments["dim"] % len(shape)
    if dim == rows.dim:
        if one.name == "slice" and one.shape[dim] == shape[dim]:
            return rows
        raise Stuck
    gone = one.name in ("select", "unbind")
    return attrs.evolve(rows, dim=rows.dim - (gone and dim < rows.dim))


def joined(one: RowOperation) -> Rows:
    """cat and stack in another dimension than that of the rows."""
    operands = [(n, r) for n, r in one.operands() if math.prod(shape_of(n))]
    moving = [rows for _, rows in operands if moves(rows)]
    if not moving:
        return fixed(one)
    dim = one.arguments["dim"] % len(one.shape)
    places = {(rows.dim, rows.before, rows.power) for rows in moving}
    alone = moving[0].dim is None or moving[0].power != 0
    if len(places) != 1 or (alone and len(moving) != len(operands)):
        raise Stuck
    found = moving[0]
    maybe = frozenset().union(*(rows.maybe for _, rows in operands))
    if found.dim is None:
        counts = frozenset().union(*(rows.counts for rows in moving))
        return attrs.evolve(
            found, maybe=maybe, counts=counts, plain=any(rows.plain for rows in moving)
        )
    if one.name == "stack":
        return attrs.evolve(found, maybe=maybe, dim=found.dim + (dim <= found.dim))
    if dim == found.dim:
        raise Stuck
    return attrs.evolve(found, maybe=maybe)


def padded(one: RowOperation) -> Rows:
    (_, rows), *_ = one.operands()
    if rows.dim is None or (rows.power and one.arguments["value"]):
        raise Stuck
    at = 2 * (len(one.shape) - 1 - rows.dim)
    if any(one.arguments["pad"][at : at + 2]):
        raise Stuck
    return rows


def written(one: RowOperation) -> Rows:
    """slice_scatter, select_scatter: a part of a tensor, in another dimension than that of the
    rows, with other values."""
    base, part = one.of("self"), one.of("src")
    if one.name == "slice_scatter" and shape_of(one.arguments["src"]) == one.shape:
        return part  # nothing is left of the tensor
    dim = one.arguments["dim"] % len(one.shape)
    if part.dim is not None and one.name == "select_scatter":
        part = attrs.evolve(part, dim=part.dim + (dim <= part.dim))
    places = {(rows.dim, rows.before, rows.power) for rows in (base, part) if moves(rows)}
    if len(places) != 1:
        raise Stuck
    ((place, before, power),) = places
    if place in (None, dim):
        raise Stuck
    return Rows(True, place, before, power, base.maybe | part.maybe)


def copied(one: RowOperation) -> Rows:
    """A tensor's values replaced by another's."""
    rows = one.of("src")
    if moves(rows) and shape_of(one.arguments["src"]) != one.shape:
        raise Stuck
    return rows


def like(one: RowOperation) -> Rows:
    """A new tensor as large as another: as many rows."""
    (_, rows), *_ = one.operands()
    if rows.dim is None:
        return FIXED
    return attrs.evolve(rows, power=0, maybe=frozenset())


def drawn(one: RowOperation) -> Rows:
    """Random numbers, as many as a tensor has, of a distribution with the same figures in every
    microbatch."""
    names = ("from", "to", "mean", "std", "lambd")
    figures = [one.number(name) for name in names if name in one.arguments]
    if any(moves(figure) for figure in figures):
        raise Stuck
    return attrs.evolve(like(one), maybe=frozenset().union(*(one.maybe for one in figures)))


def looked_up(one: RowOperation) -> Rows:
    """embedding: a table, and indices that have rows."""
    table, indices = one.of("weight"), one.of("indices")
    if moves(table) or indices.dim is None or indices.power:
        raise Stuck
    return attrs.evolve(indices, maybe=table.maybe)


def gathered(one: RowOperation) -> Rows:
    """gather and scatter along another dimension than that of the rows."""
    moving = [rows for _, rows in one.operands() if moves(rows)]
    if len({(rows.dim, rows.before, rows.power) for rows in moving}) != 1:
        raise Stuck
    if moving[0].dim is None or one.arguments["dim"] % len(one.shape) == moving[0].dim:
        raise Stuck
    maybe = frozenset().union(*(rows.maybe for _, rows in one.operands()))
    return Rows(True, moving[0].dim, moving[0].before, moving[0].power, maybe)


def indexed(one: RowOperation) -> Rows:
    """x[i, j]: indices into a table, into other dimensions, or row by row (x[arange(rows), i])."""
    table, indices = one.of("self"), one.arguments["indices"]
    given = [(at, i) for at, i in enumerate(indices) if i is not None]
    places = [at for at, _ in given]
    if not given or places != list(range(places[0], places[0] + len(places))):
        raise Stuck
    width = max(len(shape_of(i)) for _, i in given)
    found = {
        (one.known[i].dim + width - len(shape_of(i)), one.known[i].before)
        for _, i in given
        if one.known[i].dim is not None
    }
    if any(one.known[i].varies and one.known[i].dim is None for _, i in given) or len(found) > 1:
        raise Stuck
    if table.dim is None and not table.varies and found:
        ((dim, before),) = found
        return Rows(True, places[0] + dim, before, table.power, table.maybe)
    if table.dim is None or table.before != 1 or table.power:
        raise Stuck
    if table.dim in places:
        return _row_by_row(one, table, given, found, width)
    if found:
        raise Stuck
    dim = table.dim + (width - len(places) if places[0] < table.dim else 0)
    return Rows(True, dim, maybe=table.maybe)


def _row_by_row(one: RowOperation, table: Rows, given: list, found: set, width: int) -> Rows:
    """The index of the rows' dimension counts the rows, so that row stays with row."""
    index = dict(given)[table.dim]
    shape = shape_of(index)
    places = [at + width - len(shape) for at, size in enumerate(shape) if size == one.rows]
    if not _counts_rows(index, one.rows) or table.dim is None or not places:
        raise Stuck
    if table.dim != given[0][0] or found - {(places[0], 1)}:
        raise Stuck
    return Rows(True, table.dim + places[0], maybe=table.maybe)


def _counts_rows(index: fx.Node, rows: int) -> bool:
    """Whether an index is arange(rows), seen in whatever shape."""
    if math.prod(shape_of(index)) != rows:
        return False
    while operation(index) in ("view", "unsqueeze", "reshape", "_to_copy", "clone", "permute"):
        index = index.args[0]  # type: ignore[assignment]
    given = bound(index)
    return operation(index) == "arange" and (given.get("start") or 0, given["end"]) == (0, rows)
