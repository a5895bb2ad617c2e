"""Experts over members: each has the matrices of some, and computes the rows that go to these.

    rows by expert      0 0 1 2 2 2 3       of two members, with two experts each
    member 0            0 0 1               has the rows of its own experts and no others,
    member 1            2 2 2 3             as many as data decide (`Chosen`)

What is computed of each row by itself is computed by the member that has it, from the first product
of experts to the last one. Where rows come from a sequence that is cut, or go back into it, members
send one another the rows that they need (`ir.members.fetched_rows`, `added_rows`).
"""

import attrs
import torch
from torch import fx

from pfeife.factors.recipes import Make
from pfeife.ir.members import part

aten = torch.ops.aten


@attrs.frozen
class Owners:
    """Whose rows are whose: `offsets` has where the rows of each of the `experts` end."""

    offsets: fx.Node
    experts: int

    def starts(self, make: Make, offsets: fx.Node, members: int) -> tuple[fx.Node, fx.Node]:
        """Where the rows of each member start, and the offsets of a member's own experts from its
        first row on, of the offsets as they are in its graph.

            offsets     2 3 6 7         starts      0 3
                                        own         2 3 of member 0, 3 4 of member 1
        """
        each, wide = self.experts // members, make(aten._to_copy.default, offsets, dtype=torch.long)
        ends = make(aten.slice.Tensor, wide, 0, each - 1, self.experts - 1, each)
        starts = make(aten.constant_pad_nd.default, ends, [1, 0])
        first, own = (make(part, value, 0, 1, members) for value in (starts, wide))
        own = make(aten.sub.Tensor, own, first)
        return starts, make(aten._to_copy.default, own, dtype=torch.int32)
