"""What members of a group tell one another inside of a body.

    all_gather, small sums                  reduce_scatter, all_to_all
    member 0    x0 -----> x0 x1 x2          member 0    x00 x01 x02 -----> x00 x10 x20
    member 1    x1 -----> x0 x1 x2          member 1    x10 x11 x12 -----> x01 x11 x21
    member 2    x2 -----> x0 x1 x2          member 2    x20 x21 x22 -----> x02 x12 x22

    shift by 1
    member 0    x0 -----> x1
    member 1    x1 -----> x2
    member 2    x2 -----> x0

Each then does with them, in the order of members, what `MEANING` says: the bits of `evaluate`. A
large sum is scattered and then gathered. What all of it needs of memory is `ir.members.scratch`.

    fetched_rows of index 3 0 | 3 3         added_rows at 3 0 | 3 3
    member 0    x0 x1 -----> x3 x0          member 0    x0 x1 -----> x1 .
    member 1    x2 x3 -----> x3 x3          member 1    x2 x3 -----> . x0 + (x2 + x3)

Who sends which rows follows from the index, which all have; how many these are is compared first.
"""

import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx

from pfeife.ir.editing.copying import Copy, copied
from pfeife.ir.members import (
    ALONE,
    MEANING,
    added_rows,
    addend,
    all_gather,
    all_reduce,
    all_to_all,
    arrived,
    begins,
    check_rows,
    fetched_rows,
    from_the_start,
    in_pieces,
    joined_rows,
    messages,
    over_at,
    own_rows,
    part,
    placed_rows,
    reduce_scatter,
    shift,
)
from pfeife.ir.nodes import is_sized_by_data, sizes_of, value_of
from pfeife.ir.program import Program
from pfeife.ir.split import Split
from pfeife.runtime.distributed.links.connection import Connection


class Group(Protocol):
    """Who has the connection of a group, and waits for one of torch.distributed's collectives as
    all waits of the world are: bounded, and ended by a failure."""

    @property
    def group(self) -> Connection | None:
        """The connection of the members, in their order."""

    def wait(self, work: dist.Work) -> None:
        """Raises PipelineError if any rank has failed meanwhile."""


class Collectives:
    """The collectives of one member; `now` tells the group, which is another one after a
    failure."""

    def __init__(self, now: Callable[[], Group]):
        self.now = now

    def of_rank(
        self, program: Program, rank: int, bodies: Mapping[str, Callable]
    ) -> dict[str, Callable]:
        """The bodies of a rank's calls by the calls' nodes, of which some may be other ones than
        the program's; those that are graphs are bound."""
        bound: dict[str, Callable] = {}
        for call in (call for call in program.calls if call.rank == rank):
            body: Any = bodies.get(call.node, program.body(call))
            bound[call.node] = self.bound(body) if isinstance(body, fx.GraphModule) else body
        return bound

    def bound(self, body: fx.GraphModule) -> fx.GraphModule:
        """A body whose collectives are this member's."""
        return copied(body, self._bound).module()

    def _bound(self, node: fx.Node, copy: Copy) -> fx.Node | None:
        target: Any = node.target
        if node.op != "call_function" or target not in MEANING:
            return None
        if target is arrived:
            own = copy.keep(node)
            if over_at(node):
                own.target = self._ended
            return own

        expected = value_of(node.all_input_nodes[0])
        assert expected is not None
        begun, dtype, sizes = begins(node), expected.dtype, [*sizes_of(node.all_input_nodes[0])]
        if is_sized_by_data(node.all_input_nodes[0]):
            sizes = [None] * len(sizes)

        def collective(value: torch.Tensor, *rest: Any) -> Any:
            # Gloo would end the process of a member that is sent more than it waits for. Sizes that
            # are open are those of the call, about which ranks have agreed.
            known = [
                n for n, size in zip(value.shape, sizes, strict=False) if isinstance(size, int)
            ]
            closed = [size for size in sizes if isinstance(size, int)]
            if value.dtype != dtype or value.dim() != len(sizes) or known != closed:
                raise ValueError(
                    f"{target.__name__}: the program has {dtype} {list(sizes)} here, "
                    f"this is {value.dtype} {list(value.shape)}"
                )
            group = self.now().group
            assert group is not None
            if target in ALONE:
                return _alone(target, value, group.place, *rest)
            steps = _steps(group, target, value, *rest)
            under_way = steps, [next(steps)]
            return under_way if begun else self._ended(under_way)

        collective.__name__ = target.__name__  # fx writes it where the graph's code is shown
        own = copy.keep(node)
        own.target = collective
        return own

    def _ended(
        self, under_way: "tuple[Steps, list[dist.Work]]", *sent: torch.Tensor
    ) -> torch.Tensor:
        """The result of a collective that has begun, when it has arrived."""
        group, (steps, works) = self.now(), under_way
        try:
            while True:
                group.wait(works.pop())  # and forgets it, for it has what was sent
                works.append(next(steps))
        except StopIteration as end:
            result: torch.Tensor = end.value
            return result


# A collective, which says what it waits for, and goes on where that is over.
Steps = Generator[dist.Work, None, torch.Tensor]


def _steps(
    group: Connection, collective: Callable[..., Any], value: torch.Tensor, *rest: Any
) -> Steps:
    place, members = group.place, len(group.ranks)
    if collective is all_gather:
        dim, before, _ = rest
        return Split(dim, members, before).joined((yield from _stacked(group, value)))
    if collective is reduce_scatter:
        dim, before, _ = rest
        stacked = Split(dim, members, before).stacked
        return _sum((yield from _exchanged(group, stacked(value))).unbind())
    if collective is all_to_all:
        dim, before, new_dim, new_before, _ = rest
        old, new = Split(dim, members, before), Split(new_dim, members, new_before)
        if dim == new_dim:
            return _part(new, old.joined((yield from _stacked(group, value))), place)
        return old.joined((yield from _exchanged(group, new.stacked(value))))
    if collective is shift:
        return (yield from _passed(group, value, rest[0]))
    if collective is fetched_rows:
        index, sources, targets, _ = rest
        check_rows(value, sources, place)
        exchange = _Exchange.of(group, len(value), index, sources, targets)
        return (yield from exchange.fetched(value))
    if collective is added_rows:
        into, index, sources, targets, _ = rest
        check_rows(into, targets, place)
        exchange = _Exchange.of(group, len(into), index, targets, sources)
        return (yield from exchange.added(value, into))
    if collective is joined_rows:
        return (yield from _joined(group, value, rest[0]))
    if collective is placed_rows:
        return (yield from _placed(group, value, rest[1]))
    assert collective is all_reduce
    size = value.numel() * value.dtype.itemsize
    if len(messages(collective, size, members)) > 1:
        return (yield from _reduced_in_parts(group, value, *rest[1:]))
    by: str = rest[1] if len(rest) > 1 else "sum"
    if members > 2:
        return _sum((yield from _stacked(group, value)).unbind(), by)
    other = yield from _passed(group, value)
    # In the order of the members, and where the other one's has arrived.
    return _sum([other, value] if place else [value, other], by, out=other)


def _alone(
    collective: Callable[..., Any], value: torch.Tensor, place: int, *rest: Any
) -> torch.Tensor:
    """What a member makes by itself."""
    if collective is part:
        dim, before, members = rest
        return _part(Split(dim, members, before), value, place)
    if collective is own_rows:
        starts, dim, members = rest
        own = in_pieces(value, starts, members, dim)[place]
        return own.clone(memory_format=torch.contiguous_format)
    if collective is addend:
        return torch.zeros_like(value) if place else value
    return torch.tensor(place, device=value.device)


def _part(split: Split, value: torch.Tensor, place: int) -> torch.Tensor:
    """A member's part of a whole value, in memory of its own: a view would keep all of it."""
    own = split.part(value, place)
    is_view = own.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    return own.clone() if is_view else own


def _reduced_in_parts(group: Connection, value: torch.Tensor, by: str = "sum") -> Steps:
    """A sum of which each member adds up a part."""
    parts = yield from _exchanged(group, _rows(value, len(group.ranks)))
    own = _sum(parts.unbind(), by)
    del parts
    whole = (yield from _stacked(group, own)).flatten()
    padded = len(whole) > value.numel()
    return (whole[: value.numel()].clone() if padded else whole).view(value.shape)


def _rows(value: torch.Tensor, count: int) -> torch.Tensor:
    """A tensor's elements in so many rows, with zeros at their end if need be."""
    flat, missing = value.flatten(), -value.numel() % count
    return (F.pad(flat, (0, missing)) if missing else flat).view(count, -1)


def _sum(
    values: Sequence[torch.Tensor], by: str = "sum", out: torch.Tensor | None = None
) -> torch.Tensor:
    """All members' tensors as one, in their order."""
    combine = torch.add if by == "sum" else torch.maximum
    total = combine(values[0], values[1], out=out)
    for value in values[2:]:
        combine(total, value, out=total)
    return total


@attrs.frozen(eq=False)
class _Exchange:
    """The rows that pieces of an index say, of rows that are cut over the members.

    This member's piece is of `counts` rows of each member, without repetition, among which
    `inverse` has its places; each member's piece says `own` of this one's rows.
    """

    group: Connection
    inverse: torch.Tensor
    counts: list[int]
    own: list[torch.Tensor]

    @staticmethod
    def of(
        group: Connection,
        rows: int,
        index: torch.Tensor,
        starts: torch.Tensor | None,
        pieces: torch.Tensor | None,
    ) -> "_Exchange":
        """That of a member with so many rows. Raises IndexError for rows that are not there."""
        place, members = group.place, len(group.ranks)
        if starts is None:
            starts = rows * torch.arange(members, device=index.device)
            index = from_the_start(index, True, rows * members)
        else:
            index = from_the_start(index, False, 0)
        first, own, counts, inverse = int(starts[place]), [], [], index
        for member, piece in enumerate(in_pieces(index, pieces, members)):
            said, places = piece.unique(return_inverse=True)
            ends = [*torch.searchsorted(said, starts).tolist(), len(said)]
            own.append(said[ends[place] : ends[place + 1]] - first)
            if ends[0] or int(own[-1].max() if len(own[-1]) else 0) > max(rows - 1, 0):
                raise IndexError(f"{said.tolist()} are not all numbers of rows")
            if member == place:
                counts, inverse = [b - a for a, b in itertools.pairwise(ends)], places
        return _Exchange(group, inverse, counts, own)

    def fetched(self, value: torch.Tensor) -> Steps:
        """What this member's piece says of all members' rows."""
        told = [*map(len, self.own)]
        yield from self._compare(told, self.counts)
        rows = yield from _sent(self.group, value[torch.cat(self.own)], told, self.counts)
        return rows[self.inverse]

    def added(self, value: torch.Tensor, into: torch.Tensor) -> Steps:
        """This member's rows with what all pieces add to them."""
        sums = value.new_zeros([sum(self.counts), *value.shape[1:]])
        sums.index_add_(0, self.inverse, value)
        told, total = [*map(len, self.own)], into.clone()
        yield from self._compare(self.counts, told)
        received = yield from _sent(self.group, sums, self.counts, told)
        for rows, added in zip(self.own, received.split(told), strict=True):
            total.index_add_(0, rows, added)
        return total

    def _compare(self, told: list[int], heard: list[int]) -> Steps:
        """Raises ValueError where members do not agree about the index: Gloo would end the process
        of one that is sent more than it waits for (collective)."""
        counts = torch.tensor(told, device=self.inverse.device)
        said = yield from _exchanged(self.group, counts)
        if said.tolist() != heard:
            raise ValueError(
                f"members have {said.tolist()} rows for this one, which expects {heard}"
            )
        return said


def _sent(group: Connection, value: torch.Tensor, told: list[int], heard: list[int]) -> Steps:
    """The rows that members have for this one, in their order, of so many each; it has `told` rows
    of a tensor for each of them (collective)."""
    received = value.new_empty([sum(heard), *value.shape[1:]])
    row = math.prod(value.shape[1:]) * value.dtype.itemsize
    as_bytes = [*map(_as_bytes, (received, value))]
    sizes = [[count * row for count in counts] for counts in (heard, told)]
    yield group.group.alltoall_base(*as_bytes, *sizes)
    return received


def _counts(group: Connection, value: torch.Tensor, dim: int) -> Steps:
    """How many rows each member has (collective)."""
    count = torch.tensor([value.shape[dim]], device=value.device)
    return (yield from _stacked(group, count)).flatten()


def _joined(group: Connection, value: torch.Tensor, dim: int) -> Steps:
    """All members' rows, of which each has as many as it has (collective)."""
    counts, rows = (yield from _counts(group, value, dim)).tolist(), value.movedim(dim, 0)
    told = [len(rows)] * len(counts)
    repeated = rows.repeat(len(counts), *[1] * (rows.dim() - 1))
    received = yield from _sent(group, repeated, told, counts)
    return received.movedim(0, dim).contiguous()


def _placed(group: Connection, value: torch.Tensor, dim: int) -> Steps:
    """A member's rows at their place, with zeros at those of the others (collective)."""
    before, after = value.shape[:dim], value.shape[dim + 1 :]
    counts = (yield from _counts(group, value, dim)).tolist()
    parts = [value.new_zeros([*before, n, *after]) for n in counts]
    parts[group.place] = value
    return torch.cat(parts, dim)


def _as_bytes(value: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, in a row: in its own memory if that is in order."""
    return value.contiguous().flatten().view(torch.uint8)


def _exchanged(group: Connection, sent: torch.Tensor) -> Steps:
    """What each member has for this one, of [members, *part] that it sends (collective)."""
    received = torch.empty_like(sent)
    as_bytes = [*map(_as_bytes, (received, sent))]
    yield group.group.alltoall_base(*as_bytes, [], [])
    return received


def _stacked(group: Connection, value: torch.Tensor) -> Steps:
    """A tensor of each member, [members, *tensor] (collective)."""
    stack = value.new_empty([len(group.ranks), *value.shape])
    if len(stack) > 2:
        # As bytes: Gloo knows few types.
        *parts, own = map(_as_bytes, (*stack.unbind(), value))
        yield group.group.allgather([parts], [own])
        return stack
    stack[group.place] = value
    yield from _passed(group, value, into=stack[1 - group.place])
    return stack


def _passed(
    group: Connection, value: torch.Tensor, by: int = 1, into: torch.Tensor | None = None
) -> Steps:
    """The tensor of the member that comes `by` later, around; who comes as much before is told this
    one's (collective)."""
    place, members = group.place, len(group.ranks)
    if into is None:
        into = torch.empty_like(value, memory_format=torch.contiguous_format)
    as_bytes = [*map(_as_bytes, (into, value))]
    received, sent = [0] * members, [0] * members
    received[(place + by) % members] = sent[(place - by) % members] = len(as_bytes[0])
    yield group.group.alltoall_base(*as_bytes, received, sent)
    return into
