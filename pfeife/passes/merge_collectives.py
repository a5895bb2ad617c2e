"""One sum over members where several are added up."""

from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
from torch import fx

from pfeife.ir.copying import Copy, copied
from pfeife.ir.infer_values import settle
from pfeife.ir.members import all_reduce
from pfeife.ir.program import Program

aten = torch.ops.aten
_MOVED = ("reshape", "view", "_unsafe_view", "transpose", "t", "permute", "unsqueeze", "neg")


def merge_collectives() -> Callable[[Program], Program]:
    """A pass by which sums over members are taken where they are read, and those that are added to
    one another at once: the gradient of what queries, keys and values are computed of.

        all_reduce(q) + all_reduce(k) + all_reduce(v)  ->  all_reduce(q + k + v)

    A sum that others read as well stays where it is. Results are the same to within rounding, by
    another order of additions. Programs without members, or of calls, are left as they are.
    """

    def run(program: Program) -> Program:
        if program.members == 1 or program.calls:
            return program
        late = _Late(program.members)
        copy = copied(program.module, late.change)
        return settle(attrs.evolve(program, module=copy.module()))

    return run


@attrs.frozen(eq=False)
class _Sum:
    """A value that is still to be made, of nodes of the new graph: the sum of `part` over members,
    and of `rest`, which all have."""

    part: fx.Node
    rest: fx.Node | None = None


class _Late:
    """Makes sums over members as late as may be: `sums` has those that are still to be made, by
    the node of the old graph whose value that is.

        v, k, q     parts of members, r the same on all
        r + v       (part v, rest r)
        ... + k     (part v + k, rest r)
        ... + q     (part v + k + q, rest r), made once somebody reads it that cannot wait
    """

    def __init__(self, members: int) -> None:
        self.members = members
        self.sums: dict[fx.Node, _Sum] = {}

    def change(self, node: fx.Node, copy: Copy) -> Any:
        """What stands for a node; for a sum that is to be made, its part for the time being."""
        merged = self._merged(node, copy)
        if merged is None:
            self._make(node.all_input_nodes, copy)
            return None
        self.sums[node] = merged
        return merged.part

    def _merged(self, node: fx.Node, copy: Copy) -> _Sum | None:
        """The sum that a node's value is, None where it has to be made."""
        reads, name = node.all_input_nodes, getattr(node.target, "_opname", "")
        # What others read as well would be added up twice.
        late = [self.sums.get(read) if len(read.users) == 1 else None for read in reads]
        sums = [one for one in late if one is not None]
        if node.target is all_reduce and not node.args[2:]:
            self._make(reads, copy)
            return _Sum(copy.here[reads[0]])
        if name in _MOVED and len(reads) == len(sums) == 1 and sums[0].rest is None:
            return _Sum(copy.keep(node, read=lambda read: self.sums[read].part))
        if name != "add" or len(reads) != 2 or node.kwargs or not sums:
            return None
        whole = [read for read, one in zip(reads, late, strict=True) if one is None]
        self._make(whole, copy)
        rests = [copy.here[read] for read in whole]
        rests += [one.rest for one in sums if one.rest is not None]
        if len(rests) > 1:
            return None
        part = sums[0].part
        if len(sums) == 2:
            part = copy.keep(node, read=lambda read: self.sums[read].part)
        return _Sum(part, *rests)

    def _make(self, reads: Iterable[fx.Node], copy: Copy) -> None:
        """The sums that a node reads."""
        for read in reads:
            if read in self.sums:
                to_make = self.sums.pop(read)
                total = copy.graph.call_function(all_reduce, (to_make.part, self.members))
                total.meta = dict(read.meta)
                if to_make.rest is not None:
                    # The part may be of fewer dimensions than what it is added to.
                    total.meta.pop("val", None)
                    total = copy.graph.call_function(aten.add.Tensor, (to_make.rest, total))
                    total.meta = dict(read.meta)
                copy.here[read] = total
