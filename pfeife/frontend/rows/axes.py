"""Rules of operations that only say where each dimension of their first operand goes.

    permute([1, 0, 2])    0 1 2 -> 1 0 2      the rows are where their dimension is
    select(1, i)          0 1 2 -> 0 - 1      in the one that is picked there can be none
    sum(1)                0 1 2 -> 0 + 1      over them it is a sum, elsewhere they stay

`factors.axes` says where they go; what an operation makes of the values decides which of `moved`,
`each_row` and `totalled` is its rule.
"""

import attrs

from pfeife.factors.axes import Axes, dims_of, reduced
from pfeife.frontend.rows.value import RowOperation, Rows, Rule, Stuck, shape_of

# What makes each element along a dimension of others there.
_ALONG = ("cumsum", "cumprod", "logcumsumexp", "sort", "topk", "kthvalue", "flip", "roll")


def moved(axes: Axes) -> Rule:
    """The rule of an operation that leaves the values as they are, sums and means too."""

    def rule(operation: RowOperation) -> Rows:
        (source, rows), *_ = operation.operands()
        if rows.dim is None:
            return rows
        place = axes(operation, shape_of(source))[rows.dim]
        if place is None:
            raise Stuck(whole=True)
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
            mixes = "softmax" in operation.name or operation.name in _ALONG
            raise Stuck(mixes=place is None and mixes, whole=place is None and axes is reduced)
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
