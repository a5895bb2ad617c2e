"""Causal attention over a cut sequence: a member has some of the queries, and all keys and values.

                keys 0     keys 1     keys 2          what is after a member's queries counts for
    member 0    causal     after      after           nothing; each takes the blocks from its own
    member 1    all        causal     after           one on and around, so that all of them run
    member 2    all        all        causal          the same operations

Blocks are joined by the sums of exponentials of their rows, as kernels do inside (Liu et al. 2023,
"Ring attention with blockwise transformers"). The last member needs all blocks, so that what others
compute for nothing takes no time.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import fx

from pfeife._torch.attention import in_order
from pfeife.factors.recipes import Make, Part, Recipe
from pfeife.ir.members import member

aten = torch.ops.aten


def causal(kernel: Any, rank: int) -> Recipe:
    """How members compute a kernel of causal attention, which gives the sums of its rows as a
    tensor of a rank: [rows, heads, queries], or with a last dimension of 1."""

    def recipe(make: Make, part: Part) -> tuple[fx.Node, ...]:
        blocks = _blocks(make, part, kernel)
        outs, sums, *rest = blocks.results()
        rows = make(aten.stack.default, blocks.unless_after(sums, float("-inf")))
        shares = make(aten.unbind.int, make(aten._softmax.default, rows, 0, False))
        factors = [make(operator.getitem, shares, at) for at in range(part.members)]
        if rank == 3:
            factors = [make(aten.unsqueeze.default, share, -1) for share in factors]
        terms = [make(aten.mul.Tensor, *pair) for pair in zip(outs, factors, strict=True)]
        added = functools.partial(make, aten.add.Tensor)
        out = functools.reduce(added, blocks.unless_after(terms, 0.0))
        own = make(aten._to_copy.default, out, dtype=part.dtype)
        return own, make(aten.logsumexp.default, rows, [0]), *(first for first, *_ in rest)

    return recipe


def causal_backward(kernel: Any) -> Recipe:
    """How members compute the backward of a kernel of causal attention: the gradients of their own
    queries, and what these add to those of all keys and values."""

    def recipe(make: Make, part: Part) -> tuple[fx.Node, ...]:
        blocks = _blocks(make, part, kernel)
        queries, keys, values, *rest = blocks.results()
        own = make(aten.stack.default, blocks.unless_after(queries, 0.0))
        return (
            make(aten.sum.dim_IntList, own, [0]),
            *(blocks.back(blocks.unless_after(each, 0.0)) for each in (keys, values)),
            *(first for first, *_ in rest),
        )

    return recipe


@attrs.frozen(eq=False)
class _Blocks:
    """What a member computes block by block, of as many blocks of keys as there are members. The
    first one is its own; `places` are those of all keys, and `own` is its number."""

    make: Make
    part: Part
    kernel: Any
    own: fx.Node
    places: fx.Node

    def results(self) -> list[list[fx.Node]]:
        """What the kernel gives of each block, by the number of the result."""
        keys, values = (self._around(self.part.arguments[name]) for name in ("key", "value"))
        calls = [self._call(at, *pair) for at, pair in enumerate(zip(keys, values, strict=True))]
        count = len(self.kernel._schema.returns)
        return [[self.make(operator.getitem, call, at) for call in calls] for at in range(count)]

    def unless_after(self, blocks: Sequence[fx.Node], otherwise: float) -> list[fx.Node]:
        """What is computed of each block, and something else where its keys are after the
        queries."""
        make, members = self.make, self.part.members
        afters = [make(aten.lt.Scalar, self.own, members - at) for at in range(1, members)]
        pairs = zip(blocks[1:], afters, strict=True)
        return [blocks[0], *(make(aten.masked_fill.Scalar, *pair, otherwise) for pair in pairs)]

    def back(self, blocks: Sequence[fx.Node]) -> fx.Node:
        """Blocks from a member's own one on, as a whole in the order of keys."""
        return self._moved(self.make(aten.cat.default, blocks, 2), -1)

    def _around(self, whole: fx.Node) -> list[fx.Node]:
        """The blocks of keys or values, from a member's own one on and around."""
        parts = self.make(aten.split.Tensor, self._moved(whole, 1), self.part.size, 2)
        return [self.make(operator.getitem, parts, at) for at in range(self.part.members)]

    def _moved(self, whole: fx.Node, way: int) -> fx.Node:
        """A member's own keys to the beginning (1), or from there back (-1)."""
        first = self.make(aten.mul.Tensor, self.own, way * self.part.size)
        places = self.make(aten.add.Tensor, self.places, first)
        size = self.part.size * self.part.members
        places = self.make(aten.remainder.Scalar, places, size)
        return self.make(aten.index_select.default, whole, 2, places)

    def _call(self, at: int, key: fx.Node, value: fx.Node) -> fx.Node:
        """The kernel on a member's queries and one block of keys."""
        given = {**self.part.arguments, "key": key, "value": value, "is_causal": at == 0}
        given |= {"compute_log_sumexp": True, "max_q": self.part.size, "max_k": self.part.size}
        args, kwargs = in_order(self.kernel, given)
        return self.make(self.kernel, *args, **kwargs)


def _blocks(make: Make, part: Part, kernel: Any) -> _Blocks:
    own = make(member, part.arguments["query"], part.members)
    places = make(aten.arange.default, part.size * part.members, device=part.device)
    return _Blocks(make, part, kernel, own, places)
