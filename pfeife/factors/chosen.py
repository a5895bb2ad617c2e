"""The factors of operations in which data choose rows: indexing, sorting, products of experts."""

from collections.abc import Sequence

import attrs
import torch

from pfeife.factors.axes import dims_of
from pfeife.factors.equation import Equation, Label, NoRule, Operation, equation, shape_of
from pfeife.ir.nodes import value_of

Labels = list[Label]
_ALIGNED = 16  # bytes, of which rows of grouped products are multiples
_GROUPED = {
    (2, 3): ("mk", "ekn", "mn"),
    (2, 2): ("km", "mn", "ekn"),
    (3, 3): ("emk", "ekn", "emn"),
}


def indexed(operation: Operation) -> Equation:
    """x[:, index]: each element of the index by itself, and all other dimensions."""
    rest, rows, index, each = _indices(operation)
    result = [*rest[: rows[0]], *index, *rest[rows[-1] + 1 :]]
    return equation(operation, [rest, *each], [result], whole=rows)


def put(operation: Operation) -> Equation:
    """x[:, index] = values, or += values, where each element of the index adds its own."""
    rest, rows, index, each = _indices(operation)
    places = [*rest[: rows[0]], *index, *rest[rows[-1] + 1 :]]
    values = places[len(places) - len(operation.shape_of("values")) :]
    adds = bool(operation.arguments["accumulate"])
    whole = rows if adds else [*rows, *index]
    rule = equation(operation, [rest, *each, values], [rest], whole=whole)
    return attrs.evolve(rule, once=0 if adds else None)


def _indices(operation: Operation) -> tuple[Labels, Sequence[int], Labels, list[Labels]]:
    """The labels of what is indexed, which dimensions are, and the labels of all indices together
    and of each. Raises NoRule where these are not beside one another, and for masks."""
    indices = operation.arguments["indices"]
    rows = [dim for dim, index in enumerate(indices) if index is not None]
    values = [value_of(indices[dim]) for dim in rows]
    kinds = {value.dtype for value in values if value is not None}
    if not rows or rows != [*range(rows[0], rows[-1] + 1)] or kinds & {torch.bool, torch.uint8}:
        raise NoRule
    ranks = [len(shape_of(indices[dim])) for dim in rows]
    index: Labels = [("index", dim) for dim in range(max(ranks))]
    rest: Labels = [*range(len(operation.shape_of("self")))]
    return rest, rows, index, [index[len(index) - rank :] for rank in ranks]


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
    letters = _GROUPED[ranks]
    value = operation.node.meta["val"]
    grain = _ALIGNED // value.dtype.itemsize
    grains: dict[Label, int] = dict.fromkeys("mkn", grain)
    if ranks == (3, 3):
        return attrs.evolve(equation(operation, letters[:2], letters[2:]), grains=grains)
    return attrs.evolve(_of_experts(operation, letters[:2], letters[2:]), grains=grains)


def grouped_rows(operation: Operation) -> Equation:
    """The products by which transformers computes groups in other types than bfloat16."""
    return _of_experts(operation, ["mk", "ekn"], ["mn"])


def grouped_gradients(operation: Operation) -> Equation:
    """Their backward, which gives the gradients of rows and matrices."""
    return _of_experts(operation, ["mk", "ekn", "mn"], ["mk", "ekn"])


def _of_experts(operation: Operation, operands: Sequence[str], results: Sequence[str]) -> Equation:
    """Of rows and experts, with the offsets behind the second operand: a member's own experts
    compute the rows that go to them."""
    offset: Sequence[Label] = ["offset"]
    labels = [*operands[:2], offset, *operands[2:]]
    rule = equation(operation, labels, results, whole=["m", "offset"])
    return attrs.evolve(rule, owned={"m": "e"})
