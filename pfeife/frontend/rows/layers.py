"""Rules for products of matrices, whole layers and losses."""

from typing import Any

import attrs

from pfeife.frontend.rows.elements import aligned
from pfeife.frontend.rows.value import FIXED, RowOperation, Rows, Stuck, moves, shape_of


def matrices(one: RowOperation) -> Rows:
    """The rows of a product of matrices, a batch of them or not; over the rows it is a sum."""
    names = {"mat2": ("self", "mat2"), "batch2": ("batch1", "batch2"), "vec": ("self", "vec")}
    left, right = next(
        (pair for key, pair in names.items() if key in one.arguments), ("mat1", "mat2")
    )
    if one.name == "addmm":
        left, right = "mat1", "mat2"
    if one.name == "dot":
        left, right = "self", "tensor"
    product = _contracted(one, left, right)
    extra = one.known[one.node.args[0]] if one.name in ("addmm", "baddbmm") else FIXED  # type: ignore[index]
    if moves(extra) and (extra.dim, extra.before) != (product.dim, product.before):
        raise Stuck
    if one.name in ("addmm", "baddbmm") and product.power != extra.power:
        raise Stuck
    return attrs.evolve(product, maybe=product.maybe | extra.maybe)


def _contracted(one: RowOperation, left: str, right: str) -> Rows:
    a, b = one.of(left), one.of(right)
    inner_a, inner_b = (
        len(shape_of(one.arguments[left])) - 1,
        max(0, len(shape_of(one.arguments[right])) - 2),
    )
    maybe = a.maybe | b.maybe
    if a.dim == inner_a and b.dim == inner_b and a.before == b.before:
        return Rows(True, power=a.power + b.power + 1, maybe=maybe)
    if a.dim == inner_a or (b.dim == inner_b and b.dim is not None):
        raise Stuck
    if a.dim is None and b.dim is None:
        if a.varies and b.varies:
            raise Stuck
        main = a if a.varies else b
        return attrs.evolve(main, power=a.power + b.power, maybe=maybe)
    if (a.varies and a.dim is None) or (b.varies and b.dim is None) or a.power or b.power:
        raise Stuck
    both = a.dim is not None and b.dim is not None
    if both and ((a.dim, a.before) != (b.dim, b.before) or a.dim in (inner_a, inner_a - 1)):
        raise Stuck(mixes=a.dim == inner_a - 1 and b.dim == inner_b + 1)  # a product for each pair
    found = a if a.dim is not None else b
    return Rows(True, found.dim, found.before)


def batch_norm(one: RowOperation) -> tuple[Rows, ...]:
    """Rows, by convention also where they are normalised by the statistics of their microbatch;
    the statistics count as means."""
    (_, rows), *_ = one.operands()
    if rows.dim != 0 or rows.before != 1 or rows.power:
        raise Stuck
    factors = [one.known[one.arguments[name]] for name in ("weight", "bias") if one.arguments[name]]
    if any(moves(factor) for factor in factors):
        raise Stuck
    return (Rows(True, 0), *[Rows(True, plain=True)] * 5)


def batchwise(one: RowOperation) -> Rows:
    """Convolutions, pooling, resizing, normalisation: each row by itself, by weights that are no
    function of the batch."""
    (_, rows), *others = one.operands()
    if rows.dim != 0 or rows.before != 1 or rows.power or any(moves(r) for _, r in others):
        raise Stuck(mixes=bool(rows.dim))  # along places or channels
    return Rows(True, 0)


def attended(one: RowOperation) -> Rows:
    """Attention: every row by itself, in front or where heads are (tensors without heads get a
    dimension in front)."""
    operands = [(node, rows) for node, rows in one.operands() if moves(rows)]
    dims = {rows.dim for _, rows in operands}
    if any(rows.before != 1 or rows.power for _, rows in operands) or len(dims) != 1:
        raise Stuck
    (dim,) = dims
    if dim != 0 and (dim != 1 or any(len(shape_of(node)) != 4 for node, _ in operands)):
        raise Stuck(mixes=all(dim == len(shape_of(node)) - 2 for node, _ in operands))
    return Rows(True, dim)


def recurrent(one: RowOperation) -> tuple[Rows, ...]:
    """A layer of an LSTM: every row by itself, in the last dimension but one."""
    inputs = [one.arguments[name] for name in ("input", "hx_", "cx_")]
    for node, rows in one.operands():
        rest = (rows.dim, rows.before, rows.power) != (len(shape_of(node)) - 2, 1, 0)
        if moves(rows) and (rest or node not in inputs):
            raise Stuck(mixes=node is inputs[0] and rows.dim == 0)  # along time
    state = Rows(True, len(shape_of(inputs[1])) - 2)
    return Rows(True, 1), state, state, Rows(True)


def loss(one: RowOperation) -> Any:
    """A loss with a `reduction`: none, mean or sum."""
    how, weight = one.arguments["reduction"], one.arguments.get("weight")
    found = _classes(one) if one.name.startswith("nll_loss") else aligned(one)
    if found.dim is None or found.power:
        raise Stuck
    maybe = found.maybe | one.known[weight].maybe if weight else found.maybe
    if how == 0:
        each = attrs.evolve(found, maybe=maybe)
    elif how == 1:
        counts = frozenset({one.node}) if one.name.startswith("nll_loss") else frozenset()
        each = Rows(True, maybe=maybe, counts=counts, plain=not counts)
    else:
        each = Rows(True, power=1, maybe=maybe)
    return (each, Rows(True, power=1)) if one.name.startswith("nll_loss") else each


def _classes(one: RowOperation) -> Rows:
    target, scores = one.of("target"), one.of("self")
    if target.dim is None or (scores.dim, scores.before) != (target.dim, target.before):
        raise Stuck
    if target.dim or (one.arguments["weight"] is not None and moves(one.of("weight"))):
        raise Stuck
    return attrs.evolve(target, power=scores.power, maybe=scores.maybe)
