"""Rules for products of matrices, whole layers and losses."""

from typing import Any

import attrs

from pfeife.frontend.rows.elements import aligned
from pfeife.frontend.rows.value import FIXED, RowOperation, Rows, Stuck, moves, shape_of


def matrices(operation: RowOperation) -> Rows:
    """The rows of a product of matrices, a batch of them or not; over the rows it is a sum."""
    names = {"mat2": ("self", "mat2"), "batch2": ("batch1", "batch2"), "vec": ("self", "vec")}
    left, right = next(
        (pair for key, pair in names.items() if key in operation.arguments), ("mat1", "mat2")
    )
    if operation.name == "addmm":  # whose `self` is what is added, no factor
        left, right = "mat1", "mat2"
    if operation.name == "dot":
        left, right = "self", "tensor"
    product = _contracted(operation, left, right)
    extra = (
        operation.known[operation.node.args[0]]  # type: ignore[index]
        if operation.name in ("addmm", "baddbmm")
        else FIXED
    )
    if moves(extra) and (extra.dim, extra.before) != (product.dim, product.before):
        raise Stuck
    if operation.name in ("addmm", "baddbmm") and product.power != extra.power:
        raise Stuck
    return attrs.evolve(product, maybe=product.maybe | extra.maybe)


def _contracted(operation: RowOperation, left: str, right: str) -> Rows:
    a, b = operation.of(left), operation.of(right)
    inner_a, inner_b = (
        len(shape_of(operation.arguments[left])) - 1,
        max(0, len(shape_of(operation.arguments[right])) - 2),
    )
    maybe = a.maybe | b.maybe
    # Both have their rows where they are multiplied: the product is a sum over the rows.
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
    # Rows beside rows must be a batch of products; x @ x.t() has a product for each pair of rows.
    both = a.dim is not None and b.dim is not None
    if both and ((a.dim, a.before) != (b.dim, b.before) or a.dim in (inner_a, inner_a - 1)):
        raise Stuck(mixes=a.dim == inner_a - 1 and b.dim == inner_b + 1)
    rows = a if a.dim is not None else b
    return Rows(True, rows.dim, rows.before)


def batch_norm(operation: RowOperation) -> tuple[Rows, ...]:
    """Rows, by convention also where they are normalised by the statistics of their microbatch;
    the statistics count as means."""
    (_, rows), *_ = operation.operands()
    if rows.dim != 0 or rows.before != 1 or rows.power:
        raise Stuck
    factors = [
        operation.known[operation.arguments[name]]
        for name in ("weight", "bias")
        if operation.arguments[name]
    ]
    if any(moves(factor) for factor in factors):
        raise Stuck
    return (Rows(True, 0), *[Rows(True, plain=True)] * 5)  # no overload has more results


def batchwise(operation: RowOperation) -> Rows:
    """Convolutions, pooling, resizing, normalisation: each row by itself, by weights that are no
    function of the batch."""
    (_, rows), *others = operation.operands()
    if rows.dim != 0 or rows.before != 1 or rows.power or any(moves(r) for _, r in others):
        raise Stuck(mixes=bool(rows.dim))  # along places or channels
    return Rows(True, 0)


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


def loss(operation: RowOperation) -> Any:
    """A loss with a `reduction`: none, mean or sum."""
    how, weight = operation.arguments["reduction"], operation.arguments.get("weight")
    rows = _classes(operation) if operation.name.startswith("nll_loss") else aligned(operation)
    if rows.dim is None or rows.power:
        raise Stuck
    maybe = rows.maybe | operation.known[weight].maybe if weight else rows.maybe
    # 0, 1 and 2 are none, mean and sum. The mean of an nll_loss is by the targets that are not
    # ignored, which the batch decides; its second result is how many these are.
    if how == 0:
        each = attrs.evolve(rows, maybe=maybe)
    elif how == 1:
        counts = (
            frozenset({operation.node}) if operation.name.startswith("nll_loss") else frozenset()
        )
        each = Rows(True, maybe=maybe, counts=counts, plain=not counts)
    else:
        each = Rows(True, power=1, maybe=maybe)
    return (each, Rows(True, power=1)) if operation.name.startswith("nll_loss") else each


def _classes(operation: RowOperation) -> Rows:
    target, scores = operation.of("target"), operation.of("self")
    if target.dim is None or (scores.dim, scores.before) != (target.dim, target.before):
        raise Stuck
    if target.dim or (operation.arguments["weight"] is not None and moves(operation.of("weight"))):
        raise Stuck
    return attrs.evolve(target, power=scores.power, maybe=scores.maybe)
