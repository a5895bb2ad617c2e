"""Experts over members: each has the matrices of some, and computes the rows that go to these.

    rows by expert      0 0 1 2 2 2 3       of two members, with two experts each
    member 0            0 0 1 . . . .       the rows of its own experts come first, and no others
    member 1            2 2 2 3 . . .       are in its groups; at their places are zeros, and the
                                            sum of what members have is the whole

All members have all rows. Where these are cut over members they are gathered, and results are
scattered: of t members that is t / k of what it takes to send each row to the members of its k
experts alone, so as much or less from as many experts a row as there are members.
"""

import operator
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import fx

from pfeife._torch.attention import in_order
from pfeife.factors.recipes import Make, Part, Recipe
from pfeife.ir.members import member

aten = torch.ops.aten


def rows_of_experts(kernel: Any, rows: str) -> Recipe:
    """[rows, k] x [experts, k, n]: each row with the matrix of its expert."""

    def recipe(make: Make, part: Part) -> fx.Node:
        own = _own(make, part, part.arguments[rows])
        return own.back(own.call(kernel, {rows: own.first(part.arguments[rows])}))

    return recipe


def matrices_of_experts(kernel: Any) -> Recipe:
    """[k, rows] x [rows, n]: the gradients of a member's own experts."""

    def recipe(make: Make, part: Part) -> fx.Node:
        columns, rows = part.arguments["self"], part.arguments["mat2"]
        own = _own(make, part, rows)
        # As rows, and back: the kernel wants the elements of a row beside one another.
        first = make(aten.t.default, own.first(make(aten.t.default, columns)))
        return own.call(kernel, {"self": first, "mat2": own.first(rows)})

    return recipe


def gradients_of_experts(kernel: Any) -> Recipe:
    """Both at once: the gradients of rows, and of the matrices of a member's own experts."""

    def recipe(make: Make, part: Part) -> tuple[fx.Node, ...]:
        own = _own(make, part, part.arguments["input"])
        moved = {name: own.first(part.arguments[name]) for name in ("input", "grad_output")}
        both = own.call(kernel, moved)
        rows, matrices = (make(operator.getitem, both, at) for at in range(2))
        return own.back(rows), matrices

    return recipe


@attrs.frozen(eq=False)
class _Own:
    """The rows of a member's own experts: from the row `start` on, up to `ends` as if they came
    first, of which the last one is the `count`. `rows` are the numbers of all."""

    make: Make
    part: Part
    rows: fx.Node
    start: fx.Node
    ends: fx.Node
    count: fx.Node

    def call(self, kernel: Any, moved: Mapping[str, fx.Node]) -> fx.Node:
        """The kernel on a member's own groups."""
        ends = self.make(aten._to_copy.default, self.ends, dtype=torch.int32)
        args, kwargs = in_order(kernel, {**self.part.arguments, **moved, "offs": ends})
        return self.make(kernel, *args, **kwargs)

    def first(self, rows: fx.Node) -> fx.Node:
        """A member's own rows, from the first place on; nobody reads what is behind them."""
        inside = self.make(aten.lt.Tensor, self.rows, self.count)
        return self._moved(rows, aten.add.Tensor, inside)

    def back(self, rows: fx.Node) -> fx.Node:
        """Rows at their places, and zeros at those of the others."""
        make = self.make
        end = make(aten.add.Tensor, self.start, self.count)
        after = make(aten.ge.Tensor, self.rows, self.start)
        own = make(aten.logical_and.default, after, make(aten.lt.Tensor, self.rows, end))
        outside = make(aten.unsqueeze.default, make(aten.logical_not.default, own), -1)
        moved = self._moved(rows, aten.sub.Tensor, own)
        return make(aten.masked_fill.Scalar, moved, outside, 0.0)

    def _moved(self, rows: fx.Node, way: Any, where: fx.Node) -> fx.Node:
        """Those of some places by as many as there are before a member's own."""
        by = self.make(aten.mul.Tensor, where, self.start)
        return self.make(aten.index_select.default, rows, 0, self.make(way, self.rows, by))


def _own(make: Make, part: Part, rows: fx.Node) -> _Own:
    """Which rows are those of a member's own experts."""
    offsets = make(aten._to_copy.default, part.arguments["offs"], dtype=torch.int64)
    bounds = make(aten.constant_pad_nd.default, offsets, [1, 0])
    first = make(aten.mul.Tensor, make(member, offsets, part.members), part.size)
    places = make(aten.arange.default, part.size + 1, device=part.device)
    bounds = make(aten.index_select.default, bounds, 0, make(aten.add.Tensor, places, first))
    start = make(aten.slice.Tensor, bounds, 0, 0, 1)
    ends = make(aten.sub.Tensor, make(aten.slice.Tensor, bounds, 0, 1, part.size + 1), start)
    count = make(aten.slice.Tensor, ends, 0, part.size - 1, part.size)
    # Their numbers are counted, since the number of rows may be open.
    each = make(aten.ones_like.default, make(aten.select.int, rows, 1, 0), dtype=torch.int64)
    numbers = make(aten.sub.Tensor, make(aten.cumsum.default, each, 0), 1)
    return _Own(make, part, numbers, start, ends, count)
