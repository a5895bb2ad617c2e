"""Rules for numbers, for functions of elements, and for sums over dimensions."""

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
    moves,
    shape_of,
)


def fixed(one: RowOperation) -> Rows:
    maybe = frozenset().union(*(rows.maybe for _, rows in one.operands()))
    return Rows(maybe=maybe | sizes(one.shape, one.rows)) if maybe else FIXED


def made(one: RowOperation) -> Rows:
    """A tensor made from numbers: its sizes, and what it is filled with, may count rows."""
    fill = next((k for k in ("fill_value", "s") if k in one.arguments), None)
    value = one.number(fill) if fill and one.arguments[fill] else FIXED
    if one.twin is None:
        return attrs.evolve(value, maybe=value.maybe | sizes(one.shape, one.rows))
    return attrs.evolve(value, dim=_grown(one.shape, shape_of(one.twin)))


def constant(one: RowOperation) -> Rows:
    """A tensor made from Python's numbers: any of them may count rows."""
    value, other = _attribute(one.node), one.twin and _attribute(one.twin)
    if not isinstance(value, torch.Tensor):
        return Rows(maybe=sizes(one.shape, one.rows))
    if isinstance(other, torch.Tensor):
        if torch.equal(value, other):
            return FIXED
        if not value.numel() == 1 == other.numel() or value.is_complex():
            raise Stuck
        return Rows(power=growth(float(value), float(other)))
    real = torch.view_as_real(value) if value.is_complex() else value
    numbers = real.detach().unique().tolist()
    powers = frozenset().union(*(counting(float(number), one.rows) for number in numbers))
    return Rows(maybe=powers if value.numel() == 1 else powers | sizes(one.shape, one.rows))


def _attribute(node: fx.Node) -> Any:
    module = node.graph.owning_module
    return getattr(module, str(node.target), None)


def sizes(shape: Sequence[int], rows: int) -> frozenset[int]:
    return frozenset({1}) if any(size and size % rows == 0 for size in shape) else frozenset()


def _grown(shape: Sequence[int], twice: Sequence[int]) -> int | None:
    """The dimension in which a shape has twice as much for twice the rows."""
    found = [i for i, (a, b) in enumerate(zip(shape, twice, strict=True)) if a != b]
    if not found:
        return None
    if len(found) > 1 or twice[found[0]] != 2 * shape[found[0]]:
        raise Stuck
    return found[0]


def pointwise(one: RowOperation) -> Rows:
    """Any function of the elements: of rows it has rows; of sums or means nothing is known."""
    found = aligned(one)
    if found.dim is None or found.power:
        raise Stuck
    return attrs.evolve(found, maybe=frozenset())


def aligned(one: RowOperation) -> Rows:
    """Where the rows of the result are, by broadcasting; the rest from the first that has any."""
    operands = one.operands()
    partial = [rows for _, rows in operands if rows.dim is None and rows.varies]
    places = {
        (rows.dim - len(shape_of(node)) + len(one.shape), rows.before)
        for node, rows in operands
        if rows.dim is not None
    }
    if partial and (places or len(partial) > 1):
        raise Stuck
    if not places:
        return partial[0] if partial else FIXED
    if len(places) != 1:  # rows beside columns: x[:, None] - x[None]
        raise Stuck(mixes=len({dim for dim, _ in places}) > 1)
    ((dim, before),) = places
    power = max((rows.power for _, rows in operands), key=abs)
    return Rows(any(rows.varies for _, rows in operands), dim, before, power)


def same(one: RowOperation) -> Rows:
    """A copy, another type, a sign."""
    (source, rows), *_ = one.operands()
    before, after = source.meta["val"].dtype, one.node.meta["val"].dtype
    cast = before != torch.bool and not (after.is_floating_point or after.is_complex)
    cast = cast and (before.is_floating_point or after == torch.bool)
    if cast and (rows.power or (rows.dim is None and rows.varies)):
        raise Stuck
    return rows


def sum_of(one: RowOperation) -> Rows:
    """a + b, a - b: both must grow alike, and what is the same in every microbatch is a mean."""
    parts = [rows for name in ("self", "other") for rows in [one.of(name)]]
    if "alpha" in one.arguments and one.arguments["alpha"] != 1:
        raise Stuck
    maybe = parts[0].maybe | parts[1].maybe
    if all(not moves(rows) for rows in parts):
        return Rows(maybe=maybe)
    # A sum over the rows grows with them and a mean does not: how the microbatches' sums of both
    # make that of the batch, nobody can tell.
    if parts[0].power != parts[1].power:
        low = min(parts, key=lambda rows: rows.power)
        raise Stuck(numbers=1 in low.maybe)
    powers = {rows.power for rows in parts}
    if any(rows.dim is not None for rows in parts):
        return attrs.evolve(aligned(one), power=powers.pop(), maybe=maybe)
    return Rows(
        varies=any(rows.varies for rows in parts),
        power=powers.pop(),
        maybe=maybe,
        counts=parts[0].counts | parts[1].counts,
        plain=any(rows.plain or (rows.varies and not rows.counts) for rows in parts),
    )


def product(one: RowOperation) -> Rows:
    left, right = one.of("self"), one.of("other")
    return _scaled(one, left, right, 1)


def quotient(one: RowOperation) -> Rows:
    left, right = one.of("self"), one.of("other")
    if one.arguments.get("rounding_mode"):
        raise Stuck
    # A sum over a count that itself depends on the batch (targets that are not ignored): a mean
    # with that weight, so the count is kept.
    both = left.varies and right.varies and left.dim is None and right.dim is None
    if both and left.power == right.power == 1 and not (left.counts or right.counts):
        maybe = left.maybe | frozenset(-power for power in right.maybe)
        return Rows(varies=True, maybe=maybe, counts=frozenset({one.arguments["other"]}))
    if right.varies and right.dim is None:
        raise Stuck
    return _scaled(one, left, right, -1)


def _scaled(one: RowOperation, left: Rows, right: Rows, sign: int) -> Rows:
    """left * right ** sign; of two sums or means nothing is known."""
    maybe = left.maybe | frozenset(sign * power for power in right.maybe)
    power = left.power + sign * right.power
    if left.dim is not None or right.dim is not None:
        return attrs.evolve(aligned(one), power=power, maybe=maybe)
    if left.varies and right.varies:
        raise Stuck
    main = left if left.varies else right
    return attrs.evolve(main, power=power, maybe=maybe, varies=left.varies or right.varies)


def chosen(one: RowOperation) -> Rows:
    """where(mask, a, b), masked_fill: of rows."""
    found = aligned(one)
    if found.dim is None or found.power:
        raise Stuck
    maybe = [rows.maybe for _, rows in one.operands()]
    return attrs.evolve(found, maybe=frozenset().union(*maybe))


def put(one: RowOperation) -> Rows:
    """`x[mask] = number`, which is `x.masked_fill(mask, number)`."""
    masks, value = one.arguments["indices"], one.arguments["values"]
    if one.arguments["accumulate"] or len(masks) != 1 or math.prod(shape_of(value)) != 1:
        raise Stuck
    mask = masks[0].meta["val"]
    if mask.dtype != torch.bool or tuple(mask.shape) != one.shape:
        raise Stuck
    return chosen(one)


def clamped(one: RowOperation) -> Rows:
    """A count that is kept from zero is one still; else as any function."""
    rows = one.known[one.node.args[0]]  # type: ignore[index]
    low = one.arguments.get("min", one.arguments.get("other"))
    small = isinstance(low, int | float) and 0 < low <= 1 and one.arguments.get("max") is None
    if rows.dim is None and rows.varies and rows.power == 1 and small:
        return rows
    return pointwise(one)


def add(one: RowOperation) -> Rows:
    """As `sum_of`; a count with a tiny number added is a count still."""
    left, tiny = one.of("self"), one.arguments["other"]
    if isinstance(tiny, int | float) and 0 < tiny <= 1e-3 and left.power == 1 and left.varies:
        return left
    return sum_of(one)


def dims_of(one: RowOperation, rank: int) -> set[int]:
    given = one.arguments.get("dim")
    if given is None or given == []:
        return set(range(rank))
    return {d % max(rank, 1) for d in (given if isinstance(given, list | tuple) else [given])}


def over_dims(one: RowOperation) -> tuple[Rows, set[int], bool]:
    (node, rows), *_ = one.operands()
    dims = dims_of(one, len(shape_of(node)))
    return rows, dims, rows.dim in dims


def _kept(one: RowOperation, rows: Rows, dims: set[int]) -> Rows:
    """Rows after other dimensions have been reduced."""
    assert rows.dim is not None
    if one.arguments.get("keepdim"):
        return rows
    return attrs.evolve(rows, dim=rows.dim - sum(d < rows.dim for d in dims))


def summed(one: RowOperation) -> Rows:
    rows, dims, over = over_dims(one)
    if rows.dim is None:
        return rows
    if not over:
        return _kept(one, rows, dims)
    return Rows(rows.varies, power=rows.power + 1, maybe=rows.maybe)


def averaged(one: RowOperation) -> Rows:
    rows, dims, over = over_dims(one)
    if rows.dim is None:
        return rows
    if not over:
        return _kept(one, rows, dims)
    return Rows(rows.varies, power=rows.power, maybe=rows.maybe, plain=True)


def reduced(one: RowOperation) -> Rows:
    """Any reduction over other dimensions than that of the rows."""
    rows, dims, over = over_dims(one)
    if rows.dim is None or over or rows.power:
        raise Stuck
    return attrs.evolve(_kept(one, rows, dims), maybe=frozenset())


def along(one: RowOperation) -> Rows:
    """Along a dimension that is not that of the rows: softmax, cumsum, sort, flip."""
    rows, _, over = over_dims(one)
    if rows.dim is None or over or rows.power:
        raise Stuck(mixes=over and "softmax" in one.name)
    return attrs.evolve(rows, maybe=frozenset())


def normalised(one: RowOperation) -> tuple:
    rows = one.of("input")
    shape = shape_of(one.arguments["input"])
    if rows.dim is None or rows.dim >= len(shape) - len(one.arguments["normalized_shape"]):
        raise Stuck(mixes=rows.dim is not None)
    if rows.power or any(moves(given) for _, given in one.operands()[1:]):
        raise Stuck
    rest = attrs.evolve(rows, maybe=frozenset())
    return (rest, rest, rest)
