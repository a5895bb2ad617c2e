"""The factors of operations in which data choose rows: indexing, sorting, products of experts."""

from collections.abc import Sequence

import attrs
import torch

from pfeife.factors.axes import dims_of
from pfeife.factors.equation import Equation, Label, NoRule, Operation, equation, shape_of
from pfeife.ir.nodes import value_of

_ALIGNED = 16  # bytes, of which rows of grouped products are multiples
_GROUPED = {
    (2, 3): ("mk", "ekn", "mn"),
    (2, 2): ("km", "mn", "ekn"),
    (3, 3): ("emk", "ekn", "emn"),
}


def indexed(operation: Operation) -> Equation:
    """x[:, index]: each element of the index by itself, and all other dimensions."""
    rows, index = _indices(operation)
    rest: list[Label] = [*range(len(operation.shape_of("self")))]
    result = [*rest[: rows[0]], *index[-1], *rest[rows[-1] + 1 :]]
    return equation(operation, [rest, *index], [result], whole=rows)


def put(operation: Operation) -> Equation:
    """x[:, index] = values, or += values, where each element of the index adds its own."""
    rows, index = _indices(operation)
    rest: list[Label] = [*range(len(operation.shape_of("self")))]
    places = [*rest[: rows[0]], *index[-1], *rest[rows[-1] + 1 :]]
    values = places[len(places) - len(operation.shape_of("values")) :]
    adds = bool(operation.arguments["accumulate"])
    whole = rows if adds else [*rows, *index[-1]]
    rule = equation(operation, [rest, *index, values], [rest], whole=whole)
    return attrs.evolve(rule, once=0 if adds else None)


def _indices(operation: Operation) -> tuple[Sequence[int], list[Sequence[Label]]]:
    """Which dimensions are indexed, and the labels of each index. Raises NoRule where these are not
    beside one another, and for masks."""
    indices = operation.arguments["indices"]
    rows = [dim for dim, index in enumerate(indices) if index is not None]
    shapes = [shape_of(indices[dim]) for dim in rows]
    values = [value_of(indices[dim]) for dim in rows]
    kinds = {value.dtype for value in values if value is not None}
    if not rows or rows != [*range(rows[0], rows[-1] + 1)] or kinds & {torch.bool, torch.uint8}:
        raise NoRule
    rank = max(map(len, shapes))
    labels: list[Label] = [("index", dim) for dim in range(rank)]
    # The longest one last: its labels are those of the result.
    each = [labels[rank - len(shape) :] for shape in shapes]
    if len(each[-1]) < rank:
        raise NoRule
    return rows, [*each]


def ranked(operation: Operation) -> Equation:
    """sort and topk: along a dimension of which all is needed."""
    rank = len(operation.shape_of("self"))
    (dim,) = dims_of(operation, rank)
    result = [each if each != dim else "ranked" for each in range(rank)]
    return equation(operation, [range(rank)], [result, result], whole=[dim, "ranked"])


def grouped_product(operation: Operation) -> Equation:
    """Products of the rows of each expert with its own matrix, or the gradients of these: rows and
    experts belong together."""
    if operation.arguments["bias"] is not None:
        raise NoRule
    ranks = tuple(len(operation.shape_of(name)) for name in ("self", "mat2"))
    if ranks not in _GROUPED:
        raise NoRule
    first, second, result = _GROUPED[ranks]
    whole = "" if ranks == (3, 3) else "em"
    offsets = ["e"] if operation.arguments["offs"] is not None else []
    rule = equation(operation, [first, second, *offsets], [result], whole=whole)
    value = operation.node.meta["val"]
    grain = _ALIGNED // value.dtype.itemsize
    return attrs.evolve(rule, grains=dict.fromkeys("mkn", grain))
