"""Rules for products of matrices, whole layers and losses."""

from typing import Any, NoReturn

import attrs

from pfeife.frontend.rows.elements import aligned
from pfeife.frontend.rows.value import FIXED, RowOperation, Rows, Rule, Stuck, moves, shape_of


def contracted(left: str, right: str, equation: str, added: str = "") -> Rule:
    """The rule of a product of two operands, by their names and as torch.einsum has it; a third
    one may be `added` to it.

        ij,jk->ik    rows in i or in k are rows of the result; in j of both it is a sum over them
    """
    operands, result = equation.split("->")
    left_factors, right_factors = operands.split(",")
    shared = {*left_factors} & {*right_factors}

    def product(a: Rows, b: Rows) -> Rows:
        along = _factor(left_factors, a), _factor(right_factors, b)
        # Each row is in a product once for either operand, so powers add up.
        power, maybe = a.power + b.power, a.maybe | b.maybe
        if along == (None, None):
            if a.varies and b.varies:
                raise Stuck
            return attrs.evolve(a if a.varies else b, power=power, maybe=maybe)
        if any(factor and factor not in result for factor in along):
            if along[0] != along[1] or a.before != b.before:
                raise Stuck
            return Rows(True, power=power + 1, maybe=maybe)
        if any(rows.power or (rows.varies and rows.dim is None) for rows in (a, b)):
            raise Stuck(mixes=any(rows.varies and rows.dim is None for rows in (a, b)))
        # Rows beside rows must be a batch of products; x @ x.t() has a product for each pair.
        if None not in along and (along[0] != along[1] or a.before != b.before):
            raise Stuck(mixes=not shared.intersection(along))
        return Rows(
            True, result.index(next(filter(None, along))), a.before if along[0] else b.before
        )

    def rule(operation: RowOperation) -> Rows:
        rows = product(operation.of(left), operation.of(right))
        extra = operation.of(added) if added else FIXED
        if moves(extra) and (extra.dim, extra.before) != (rows.dim, rows.before):
            raise Stuck
        if added and rows.power != extra.power:
            raise Stuck
        return attrs.evolve(rows, maybe=rows.maybe | extra.maybe)

    return rule


def _factor(factors: str, rows: Rows) -> str | None:
    """Which factor of an operand has the rows."""
    return None if rows.dim is None else factors[rows.dim]


def batch_norm(operation: RowOperation) -> tuple[Rows, ...]:
    """Rows, by convention also where they are normalised by the statistics of their microbatch;
    the statistics count as means."""
    (_, rows), *_ = operation.operands()
    factors = [operation.arguments[name] for name in ("weight", "bias")]
    if any(moves(operation.rows_of[factor]) for factor in factors if factor):
        raise Stuck
    if rows.dim != 0 or rows.before != 1 or rows.power:
        raise Stuck
    return (Rows(True, 0), *[Rows(True, plain=True)] * 5)  # no overload has more results


def distances(operation: RowOperation) -> NoReturn:
    """cdist: with rows beside rows there is one for each pair of them."""
    beside = [rows.dim == len(shape_of(node)) - 2 for node, rows in operation.operands()]
    raise Stuck(mixes=all(beside))


def batchwise(operation: RowOperation) -> Rows:
    """Convolutions, pooling, resizing, normalisation: each row by itself, by weights that are no
    function of the batch."""
    (_, rows), *others = operation.operands()
    if rows.dim != 0 or rows.before != 1 or rows.power or any(moves(r) for _, r in others):
        raise Stuck(mixes=bool(rows.dim))  # along places or channels
    return Rows(True, 0)


def normalised(operation: RowOperation) -> tuple[Rows, ...]:
    """A layer or RMS norm over other dimensions than that of the rows, and its statistics."""
    rows = operation.of("input")
    shape = shape_of(operation.arguments["input"])
    if rows.dim is None or rows.dim >= len(shape) - len(operation.arguments["normalized_shape"]):
        raise Stuck(mixes=rows.dim is not None)
    if rows.power or any(moves(parameter) for _, parameter in operation.operands()[1:]):
        raise Stuck
    return (attrs.evolve(rows, maybe=frozenset()),) * 3


def attended(operation: RowOperation) -> Rows:
    """Attention: every row by itself, in front or where heads are (tensors without heads get a
    dimension in front)."""
    operands = [(node, rows) for node, rows in operation.operands() if moves(rows)]
    dims = {rows.dim for _, rows in operands}
    if any(rows.before != 1 or rows.power for _, rows in operands) or len(dims) != 1:
        raise Stuck
    (dim,) = dims
    if dim != 0 and (dim != 1 or any(len(shape_of(node)) != 4 for node, _ in operands)):
        raise Stuck(mixes=all(dim == len(shape_of(node)) - 2 for node, _ in operands))
    return Rows(True, dim)


def recurrent(operation: RowOperation) -> tuple[Rows, ...]:
    """A layer of an LSTM: every row by itself, in the last dimension but one."""
    inputs = [operation.arguments[name] for name in ("input", "hx_", "cx_")]
    for node, rows in operation.operands():
        rest = (rows.dim, rows.before, rows.power) != (len(shape_of(node)) - 2, 1, 0)
        if moves(rows) and (rest or node not in inputs):
            raise Stuck(mixes=node is inputs[0] and rows.dim == 0)  # along time
    state = Rows(True, len(shape_of(inputs[1])) - 2)
    return Rows(True, 1), state, state, Rows(True)


def loss(operation: RowOperation) -> Rows:
    """A loss with a `reduction`: none, mean or sum."""
    return _reduced(operation, aligned(operation), frozenset())


def nll_loss(operation: RowOperation) -> tuple[Rows, Rows]:
    """A loss of classes, whose mean is by the targets that are not ignored: the batch decides how
    many these are, which is its second result."""
    target, scores, weight = (
        operation.of(n) if operation.arguments[n] else FIXED for n in ("target", "self", "weight")
    )
    if target.dim != 0 or (scores.dim, scores.before) != (0, target.before) or moves(weight):
        raise Stuck
    rows = attrs.evolve(target, power=scores.power, maybe=scores.maybe)
    return _reduced(operation, rows, frozenset({operation.node})), Rows(True, power=1)


def _reduced(operation: RowOperation, rows: Rows, counts: frozenset[Any]) -> Rows:
    """What becomes of the loss of each row; `counts` divide the mean, if not all rows do."""
    if rows.dim is None or rows.power:
        raise Stuck
    weight = operation.arguments.get("weight")
    maybe = rows.maybe | operation.rows_of[weight].maybe if weight else rows.maybe
    match operation.arguments["reduction"]:  # as torch numbers them
        case 0:
            return attrs.evolve(rows, maybe=maybe)
        case 1:
            return Rows(True, maybe=maybe, counts=counts, plain=not counts)
    return Rows(True, power=1, maybe=maybe)
