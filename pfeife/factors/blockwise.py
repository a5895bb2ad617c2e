"""Attention over a cut sequence, block by block: a member has some of the queries.

                keys 0     keys 1     keys 2          what is after a member's queries counts for
    member 0    causal     after      after           nothing; each takes its own block and those
    member 1    all        causal     after           before it, around, so that all of them run
    member 2    all        all        causal          the same operations

Blocks are joined by the sums of exponentials of their rows, as kernels do inside (Liu et al. 2023,
"Ring attention with blockwise transformers"). The last member needs all blocks, so that what others
compute for nothing takes no time.

Either a member is given all keys and values, and has a part of the gradients of all; or, in a ring,
it has its own, and they go around, t - 1 times:

    keys, values    member 0 -> member 1 -> member 2 -> member 0    each computes with what it has
    gradients       the same way; each adds its own to what it was passed, until they are home

Blocks are computed one after another; of their results none is kept, but for the gradients of keys
and values that all are given.
"""

import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import fx

from pfeife._torch.attention import in_order
from pfeife.factors.recipes import Make, Part, Recipe, computed
from pfeife.ir.members import member, shift

aten = torch.ops.aten


@attrs.frozen
class Kernel:
    """One of torch's attention; whether it `is_causal` or has a `mask`, the argument of that name,
    and whether keys and values go around in a `ring`. It gives the sums of its rows as a tensor of
    rank `sums`: [rows, heads, queries], or with a last dimension of 1."""

    operation: Any
    is_causal: bool
    ring: bool
    sums: int
    mask: str | None = None

    @property
    def recipe(self) -> Recipe:
        """How members compute the kernel, or the backward of one."""
        return self._backward if "backward" in str(self.operation) else self._forward

    def _forward(self, make: Make, part: Part) -> tuple[fx.Node, ...]:
        """For a member's own queries. Two blocks of keys are one:

        sums    log(exp(a) + exp(b))        out    exp(a - sums) out a + exp(b - sums) out b
        """
        blocks = self._blocks(make, part)
        mask = _Mask(blocks, part.arguments[self.mask]) if self.mask else None
        computed = mask.computed if mask else blocks.computed
        out, sums, *rest = computed(blocks.own)
        for block in blocks.others():
            more, added, *_ = computed(block)
            added = blocks.unless_after(block, added, float("-inf"))
            both = make(aten.logaddexp.default, sums, added)
            own = self._weighted(make, out, make(aten.sub.Tensor, sums, both))
            more = self._weighted(make, more, make(aten.sub.Tensor, added, both))
            out = make(aten.add.Tensor, own, blocks.unless_after(block, more, 0.0))
            sums = both
        if mask:
            sums = mask.whole_sums(sums)
        return make(aten._to_copy.default, out, dtype=part.dtype), sums, *rest

    def _weighted(self, make: Make, out: fx.Node, exponents: fx.Node) -> fx.Node:
        """Each row of a result by the exponential of its own number."""
        weights = make(aten.exp.default, exponents)
        if self.sums == 3:
            weights = make(aten.unsqueeze.default, weights, -1)
        return make(aten.mul.Tensor, out, weights)

    def _backward(self, make: Make, part: Part) -> tuple[fx.Node, ...]:
        """The gradients of a member's own queries, and what these add to those of all keys and
        values; in a ring the gradients of its own ones."""
        blocks = self._blocks(make, part)
        exact = torch.promote_types(part.dtype, torch.float32)
        queries: fx.Node | None = None
        keys: list[fx.Node] = []
        values: list[fx.Node] = []
        for block in itertools.chain(blocks.others(), [blocks.own]):
            query, key, value, *rest = blocks.computed(block)
            query = make(aten._to_copy.default, blocks.unless_after(block, query, 0.0), dtype=exact)
            queries = query if queries is None else make(aten.add.Tensor, queries, query)
            keys = blocks.collected(keys, blocks.unless_after(block, key, 0.0))
            values = blocks.collected(values, blocks.unless_after(block, value, 0.0))
        own = make(aten._to_copy.default, queries, dtype=part.dtype)
        return own, blocks.back(keys), blocks.back(values), *rest

    def _blocks(self, make: Make, part: Part) -> "_Blocks":
        return (_Passed if self.ring else _Gathered)(make, part, self)


@attrs.frozen
class _Block:
    """The keys and values that are so many blocks after those of a member's own."""

    at: int
    key: fx.Node
    value: fx.Node


class _Blocks(ABC):
    """The blocks of keys and values, of which there are as many as members: this one's is `own`.
    `number` is which member it is."""

    own: _Block

    def __init__(self, make: Make, part: Part, kernel: Kernel):
        self.make, self.part, self.kernel = make, part, kernel
        self.number = make(member, part.arguments["query"], part.members)

    @abstractmethod
    def others(self) -> Iterator[_Block]:
        """Those of other members, the one before it first."""

    @abstractmethod
    def collected(self, gradients: list[fx.Node], block: fx.Node) -> list[fx.Node]:
        """What is kept of the gradients of blocks so far, and of those of the next: of `others`,
        and of its own at last."""

    @abstractmethod
    def back(self, gradients: list[fx.Node]) -> fx.Node:
        """The gradients that have been collected, as one."""

    def computed(self, block: _Block, columns: fx.Node | None = None) -> list[fx.Node]:
        """What the kernel gives of a member's queries and one block, each result, with the columns
        of its mask unless others are given."""
        causal = self.kernel.is_causal and block.at == 0
        given = {**self.part.arguments, "key": block.key, "value": block.value, "is_causal": causal}
        given |= {"compute_log_sumexp": True, "max_q": self.part.size, "max_k": self.part.size}
        if self.kernel.mask:
            mask = self.part.arguments[self.kernel.mask]
            given[self.kernel.mask] = columns or self.columns(block, mask)
        args, kwargs = in_order(self.kernel.operation, given)
        call = self.make(self.kernel.operation, *args, **kwargs)
        results = range(len(self.kernel.operation._schema.returns))
        return [self.make(operator.getitem, call, result) for result in results]

    def columns(self, block: _Block, mask: fx.Node) -> fx.Node:
        """Those of a mask that are of the keys of a block."""
        make, part = self.make, self.part
        which = make(aten.add.Scalar, self.number, block.at)
        which = make(aten.remainder.Scalar, which, part.members)
        places = make(aten.arange.default, part.size, device=part.device)
        places = make(aten.add.Tensor, places, make(aten.mul.Scalar, which, part.size))
        return make(aten.index_select.default, mask, -1, places)

    def unless_after(self, block: _Block, result: fx.Node, otherwise: float) -> fx.Node:
        """A result of a block; of a causal kernel something else where its keys are after the
        queries."""
        if not self.kernel.is_causal or block.at == 0:
            return result
        after = self.make(aten.lt.Scalar, self.number, self.part.members - block.at)
        return self.make(aten.masked_fill.Scalar, result, after, otherwise)


class _Mask:
    """What a mask adds to the scores of a member's queries.

        scores of a row      mask           the kernel's sum       here, less the row's largest
        0.3  0.1  | 0.2      -1e4 each      -1e4, but for .001     log(exp(0.3) + exp(0.1)) | 0.2
        0.3  0.1  | 0.2      -1e9 each      -1e9                   log(2) | log(1): scores are lost
        0.3  0.1  | 0.2      -inf each      0, and an out of 0     log(2) | log(1)

    The sums of two blocks say how much each counts, so they are needed without the number that is
    the largest of the row: in it their fractions are lost, and from about 8 / eps on the scores as
    well, so that one device takes all its keys alike. Below that it rounds scores, which is not
    done here.
    """

    def __init__(self, blocks: _Blocks, mask: fx.Node):
        self.blocks, self.make, self.mask = blocks, blocks.make, mask
        self.dtype = torch.promote_types(blocks.part.dtype, torch.float32)  # of sums
        # In the type of sums: the least numbers of float16 are near to others.
        self.most = self._exactly(self.make(aten.amax.default, mask, [-1], True))
        size = self.make(aten.abs.default, self.most)
        self.lost = self.make(aten.gt.Scalar, size, 8 / torch.finfo(self.dtype).eps)

    def computed(self, block: _Block) -> list[fx.Node]:
        """What the kernel gives of a block, with sums less the largest number of the row."""
        make, columns = self.make, self._exactly(self.blocks.columns(block, self.mask))
        less = make(aten.sub.Tensor, columns, self.most)
        less = make(aten.where.self, self.lost, columns, less)
        out, sums, *rest = self.blocks.computed(block, less)
        keys = make(aten.eq.Tensor, columns, self.most)
        keys = make(aten.sum.dim_IntList, keys, [-1], True, dtype=self.dtype)
        most = make(aten.amax.default, columns, [-1], True)
        empty = self._of_rows(make(aten.eq.Scalar, most, float("-inf")))
        # Two blocks without keys are one: of their sums there is a difference, of infinities none.
        sums = make(aten.masked_fill.Scalar, sums, empty, self._least)
        alike = make(aten.clamp.default, make(aten.log.default, keys), self._least)
        return [
            out,
            make(aten.where.self, self._of_rows(self.lost), self._of_rows(alike), sums),
            *rest,
        ]

    def whole_sums(self, sums: fx.Node) -> fx.Node:
        """Those of all keys, as the kernel gives them."""
        make, most = self.make, self._of_rows(self.most)
        whole = make(aten.add.Tensor, most, sums)
        none = make(aten.eq.Scalar, most, float("-inf"))
        return make(aten.masked_fill.Scalar, whole, none, 0)

    def _exactly(self, value: fx.Node) -> fx.Node:
        return self.make(aten._to_copy.default, value, dtype=self.dtype)

    @property
    def _least(self) -> float:
        """The sum of no keys."""
        return torch.finfo(self.dtype).min / 2

    def _of_rows(self, value: fx.Node) -> fx.Node:
        """A number for each row, as sums are."""
        return self.make(aten.squeeze.dim, value, -1)


class _Gathered(_Blocks):
    """Of keys and values that every member is given whole, in the order of members."""

    def __init__(self, make: Make, part: Part, kernel: Kernel):
        super().__init__(make, part, kernel)
        keys, values = (self._parts(part.arguments[name]) for name in ("key", "value"))
        pairs = zip(keys, values, strict=True)
        self.own, *self.after = (_Block(at, *pair) for at, pair in enumerate(pairs))

    def others(self) -> Iterator[_Block]:
        return reversed(self.after)

    def collected(self, gradients: list[fx.Node], block: fx.Node) -> list[fx.Node]:
        return [block, *gradients]

    def back(self, gradients: list[fx.Node]) -> fx.Node:
        return self._moved(self.make(aten.cat.default, gradients, 2), -1)

    def _parts(self, whole: fx.Node) -> list[fx.Node]:
        """Keys or values by block, from a member's own one on and around."""
        parts = self.make(aten.split.Tensor, self._moved(whole, 1), self.part.size, 2)
        return [self.make(operator.getitem, parts, at) for at in range(self.part.members)]

    def _moved(self, whole: fx.Node, way: int) -> fx.Node:
        """A member's own keys to the beginning (1), or from there back (-1)."""
        make, size = self.make, self.part.whole
        far = computed(make, operator.mul, self.part.size, way)
        first = make(aten.mul.Tensor, self.number, far)
        places = make(aten.arange.default, size, device=self.part.device)
        places = make(aten.remainder.Scalar, make(aten.add.Tensor, places, first), size)
        return make(aten.index_select.default, whole, 2, places)


class _Passed(_Blocks):
    """Of a member's own keys and values, which go around."""

    def __init__(self, make: Make, part: Part, kernel: Kernel):
        super().__init__(make, part, kernel)
        self.own = _Block(0, part.arguments["key"], part.arguments["value"])

    def others(self) -> Iterator[_Block]:
        key, value = self.own.key, self.own.value
        for at in reversed(range(1, self.part.members)):
            key, value = self._passed(key), self._passed(value)
            yield _Block(at, key, value)

    def collected(self, gradients: list[fx.Node], block: fx.Node) -> list[fx.Node]:
        total = [self.make(aten.add.Tensor, self._passed(each), block) for each in gradients]
        return total or [block]

    def back(self, gradients: list[fx.Node]) -> fx.Node:
        return gradients[0]

    def _passed(self, value: fx.Node) -> fx.Node:
        """That of the member before."""
        return self.make(shift, value, -1, self.part.members)
