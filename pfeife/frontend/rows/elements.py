"""Rules for numbers and for functions of elements."""

import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import fx

from pfeife.frontend.rows.value import (
    FIXED,
    RowOperation,
    Rows,
    Stuck,
    counting,
    growth,
    keeps_from_zero,
    moves,
    shape_of,
)


def fixed(operation: RowOperation) -> Rows:
    """What is the same in every microbatch; the numbers in it, and its sizes, may count rows."""
    maybe = operation.maybe
    return Rows(maybe=maybe | sizes(operation.shape, operation.rows)) if maybe else FIXED


def made(operation: RowOperation) -> Rows:
    """A tensor made from numbers: its sizes, and what it is filled with, may count rows."""
    fill = next((k for k in ("fill_value", "s") if k in operation.arguments), None)
    value = operation.number(fill) if fill and operation.arguments[fill] else FIXED
    if operation.twin is None:
        return attrs.evolve(value, maybe=value.maybe | sizes(operation.shape, operation.rows))
    return attrs.evolve(value, dim=_grown(operation.shape, shape_of(operation.twin)))


def constant(operation: RowOperation) -> Rows:
    """A tensor made from Python's numbers: any of them may count rows."""
    value, other = _attribute(operation.node), operation.twin and _attribute(operation.twin)
    if not isinstance(value, torch.Tensor):
        return Rows(maybe=sizes(operation.shape, operation.rows))
    if isinstance(other, torch.Tensor):
        if torch.equal(value, other):
            return FIXED
        if not value.numel() == 1 == other.numel() or value.is_complex():
            raise Stuck
        return Rows(power=growth(float(value), float(other)))
    # Without the graph for twice the rows beside it, any of its numbers may count them.
    real = torch.view_as_real(value) if value.is_complex() else value
    numbers = real.detach().unique().tolist()
    powers = frozenset().union(*(counting(float(number), operation.rows) for number in numbers))
    return Rows(
        maybe=powers if value.numel() == 1 else powers | sizes(operation.shape, operation.rows)
    )


def _attribute(node: fx.Node) -> Any:
    module = node.graph.owning_module
    return getattr(module, str(node.target), None)


def sizes(shape: Sequence[int], rows: int) -> frozenset[int]:
    """What the sizes of a tensor would add to the power if they counted rows."""
    return frozenset({1}) if any(size and size % rows == 0 for size in shape) else frozenset()


def _grown(shape: Sequence[int], twice: Sequence[int]) -> int | None:
    """The dimension in which a shape has twice as much for twice the rows."""
    dims = [i for i, (a, b) in enumerate(zip(shape, twice, strict=True)) if a != b]
    if not dims:
        return None
    if len(dims) > 1 or twice[dims[0]] != 2 * shape[dims[0]]:
        raise Stuck
    return dims[0]


def pointwise(operation: RowOperation) -> Rows:
    """Any function of the elements: of rows it has rows; of sums or means nothing is known."""
    return attrs.evolve(chosen(operation), maybe=frozenset())


def aligned(operation: RowOperation) -> Rows:
    """Where the rows of the result are, by broadcasting; the rest from the first that has any."""
    operands = operation.operands()
    partial = [rows for _, rows in operands if rows.dim is None and rows.varies]
    places = {
        (rows.dim - len(shape_of(node)) + len(operation.shape), rows.before)
        for node, rows in operands
        if rows.dim is not None
    }
    # A sum or mean over the rows of one microbatch is not that of the batch: added to each row
    # (x - x.mean(0)), it makes them depend on the others.
    if partial and (places or len(partial) > 1):
        raise Stuck(mixes=bool(places))
    if not places:
        return partial[0] if partial else FIXED
    if len(places) != 1:  # rows beside columns: x[:, None] - x[None]
        raise Stuck(mixes=len({dim for dim, _ in places}) > 1)
    ((dim, before),) = places
    power = max((rows.power for _, rows in operands), key=abs)
    return Rows(any(rows.varies for _, rows in operands), dim, before, power)


def same(operation: RowOperation) -> Rows:
    """A copy, another type, a sign."""
    (source, rows), *_ = operation.operands()
    before, after = source.meta["val"].dtype, operation.node.meta["val"].dtype
    cast = before != torch.bool and not (after.is_floating_point or after.is_complex)
    cast = cast and (before.is_floating_point or after == torch.bool)
    # The microbatches' rounded sums are not the batch's: x.sum().long(), x.sum().bool().
    if cast and (rows.power or (rows.dim is None and rows.varies)):
        raise Stuck
    return rows


def sum_of(operation: RowOperation) -> Rows:
    """a + b, a - b: both must grow alike, and what is the same in every microbatch is a mean."""
    parts = [rows for name in ("self", "other") for rows in [operation.of(name)]]
    if "alpha" in operation.arguments and operation.arguments["alpha"] != 1:
        raise Stuck
    maybe = parts[0].maybe | parts[1].maybe
    if all(not moves(rows) for rows in parts):
        return Rows(maybe=maybe)
    # A sum over the rows grows with them and a mean does not: how the microbatches' sums of both
    # make that of the batch, nobody can tell.
    if parts[0].power != parts[1].power:
        low = min(parts, key=lambda rows: rows.power)
        raise Stuck(numbers=1 in low.maybe, mixes=_beside_rows(parts))
    powers = {rows.power for rows in parts}
    if any(rows.dim is not None for rows in parts):
        return attrs.evolve(aligned(operation), power=powers.pop(), maybe=maybe)
    return Rows(
        varies=any(rows.varies for rows in parts),
        power=powers.pop(),
        maybe=maybe,
        counts=parts[0].counts | parts[1].counts,
        plain=any(rows.plain or (rows.varies and not rows.counts) for rows in parts),
    )


def product(operation: RowOperation) -> Rows:
    """a * b."""
    left, right = operation.of("self"), operation.of("other")
    return _scaled(operation, left, right, 1)


def quotient(operation: RowOperation) -> Rows:
    """a / b, which is a mean where a sum is divided by a count."""
    left, right = operation.of("self"), operation.of("other")
    if operation.arguments.get("rounding_mode"):
        raise Stuck
    # A sum over a count that itself depends on the batch (targets that are not ignored): a mean
    # with that weight, so the count is kept.
    both = left.varies and right.varies and left.dim is None and right.dim is None
    if both and left.power == right.power == 1 and not (left.counts or right.counts):
        maybe = left.maybe | frozenset(-power for power in right.maybe)
        return Rows(varies=True, maybe=maybe, counts=frozenset({operation.arguments["other"]}))
    if right.varies and right.dim is None:
        raise Stuck(mixes=_beside_rows([left, right]))
    return _scaled(operation, left, right, -1)


def _beside_rows(operands: Sequence[Rows]) -> bool:
    """Whether a sum or mean over the rows is beside rows, which then depend on one another."""
    sums = any(rows.varies and rows.dim is None for rows in operands)
    return sums and any(rows.dim is not None for rows in operands)


def _scaled(operation: RowOperation, left: Rows, right: Rows, sign: int) -> Rows:
    """left * right ** sign; of two sums or means nothing is known."""
    maybe = left.maybe | frozenset(sign * power for power in right.maybe)
    power = left.power + sign * right.power
    if left.dim is not None or right.dim is not None:
        return attrs.evolve(aligned(operation), power=power, maybe=maybe)
    if left.varies and right.varies:
        raise Stuck
    main = left if left.varies else right
    return attrs.evolve(main, power=power, maybe=maybe, varies=left.varies or right.varies)


def chosen(operation: RowOperation) -> Rows:
    """where(mask, a, b), masked_fill: of rows."""
    rows = aligned(operation)
    if rows.dim is None or rows.power:
        raise Stuck
    return attrs.evolve(rows, maybe=operation.maybe)


def put(operation: RowOperation) -> Rows:
    """`x[mask] = number`, which is `x.masked_fill(mask, number)`."""
    masks, value = operation.arguments["indices"], operation.arguments["values"]
    if operation.arguments["accumulate"] or len(masks) != 1 or math.prod(shape_of(value)) != 1:
        raise Stuck
    mask = masks[0].meta["val"]
    if mask.dtype != torch.bool or tuple(mask.shape) != operation.shape:
        raise Stuck
    return chosen(operation)


def clamped(operation: RowOperation) -> Rows:
    """A count that is kept from zero is one still; else as any function."""
    rows = operation.rows_of[operation.node.args[0]]  # type: ignore[index]
    is_count = rows.dim is None and rows.varies and rows.power == 1
    return rows if is_count and keeps_from_zero(operation.node) else pointwise(operation)


def add(operation: RowOperation) -> Rows:
    """As `sum_of`; a count with a tiny number added is a count still."""
    left = operation.of("self")
    is_count = left.power == 1 and left.varies
    return left if is_count and keeps_from_zero(operation.node) else sum_of(operation)
