"""What the members of a group that shares the work of a stage tell one another, and what it means.

A program with an axis of `t` members is one graph, which each of them runs on its part of the
values. A value is the same on all of them (R), cut along a dimension (S), cut there as data decide
(C: which rows go to whose experts), or a sum of which each has a part (P). Collectives make one of
another:

    all_reduce      P    -> R       x0 + x1 + ..., added in the order of members, or the largest
    all_gather      S(d) -> R       cat([x0, x1, ...], d)
    part            R    -> S(d)    member i keeps the i-th of t equal parts; nothing is sent
    addend          R    -> P       the first member keeps it, the others have zeros
    reduce_scatter  P    -> S(d)    member i gets its part of the sum
    all_to_all      S(d) -> S(e)    member i gets the i-th part in e of every member's
    shift           S(d) -> S(d)    member i gets the part of the one that comes so many later
    own_rows        R    -> C(d)    member i keeps what lies from the i-th start on; nothing is sent
    placed_rows     C(d) -> P       at their places, with zeros at those of the others
    joined_rows     C(d) -> R       cat([x0, x1, ...], d)
    fetched_rows    S, C -> S, C    x[index], of which each member is sent what its part reads
    added_rows      S, C -> S, C    x added up at index, of which each is sent what is in its part

A collective is over where its node is, but if `arrived` alone reads it: then its messages are under
way from its node on, and over there.

`MEANING` has them as functions of the list of all members' tensors: `ir.lockstep` runs a graph by
these in one process, and ranks give the same bits.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pfeife import _torch
from pfeife.ir.split import Split

Tensors = Sequence[torch.Tensor]


def _shaped(name: str, value: torch.Tensor, result: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What a collective gives of a fake tensor: its shape. Raises RuntimeError for a real one: one
    process alone cannot know what the other members have."""
    if not isinstance(value, _torch.FakeTensor):
        raise RuntimeError(
            f"{name} was run by one member alone; pfeife.evaluate runs all of them in lockstep"
        )
    return result()


def member(like: torch.Tensor, members: int) -> torch.Tensor:
    """Which one of the members it is: a scalar, on the device of a tensor."""
    return _shaped("member", like, lambda: like.new_zeros((), dtype=torch.int64))


def all_reduce(value: torch.Tensor, members: int, by: str = "sum") -> torch.Tensor:
    """P -> R. The sum (or the "max") of all members' tensors, of the same shape."""
    return _shaped("all_reduce", value, lambda: _all_rows(value))


def all_gather(value: torch.Tensor, dim: int, before: int, members: int) -> torch.Tensor:
    """S(dim) -> R. All members' tensors, joined along a dimension."""
    split = Split(dim, members, before)
    return _shaped("all_gather", value, lambda: split.join([value] * members))


def part(value: torch.Tensor, dim: int, before: int, members: int) -> torch.Tensor:
    """R -> S(dim). A member's own part along a dimension that `members` divides."""
    split = Split(dim, members, before)
    return _shaped("part", value, lambda: split.parts(value)[0])


def addend(value: torch.Tensor, members: int) -> torch.Tensor:
    """R -> P. What is added to a sum once: a tensor on the first member, zeros on the others."""
    return _shaped("addend", value, value.clone)


def reduce_scatter(value: torch.Tensor, dim: int, before: int, members: int) -> torch.Tensor:
    """P -> S(dim). A member's own part of the sum of all members' tensors."""
    split = Split(dim, members, before)
    return _shaped("reduce_scatter", value, lambda: split.parts(value)[0])


def all_to_all(
    value: torch.Tensor, old: int, old_before: int, new: int, new_before: int, members: int
) -> torch.Tensor:
    """S(old) -> S(new). A value that is cut along one dimension, cut along another."""
    before, after = Split(old, members, old_before), Split(new, members, new_before)
    return _shaped("all_to_all", value, lambda: after.parts(before.join([value] * members))[0])


def shift(value: torch.Tensor, by: int, members: int) -> torch.Tensor:
    """S -> S. The tensor of the member that comes `by` later, around; all are of one shape."""
    return _shaped("shift", value, lambda: value.clone(memory_format=torch.contiguous_format))


def arrived(value: torch.Tensor, *sent: torch.Tensor) -> torch.Tensor:
    """What a collective gives, whose messages are under way up to here; what is `sent` stays."""
    return value


def own_rows(value: torch.Tensor, starts: torch.Tensor, dim: int, members: int) -> torch.Tensor:
    """R -> C(dim). A member's own rows: from its start on up to the next one's. One alone is given
    the most that these can be."""
    return _shaped("own_rows", value, lambda: _all_rows(value))


def placed_rows(value: torch.Tensor, starts: torch.Tensor, dim: int, members: int) -> torch.Tensor:
    """C(dim) -> P. A member's own rows at their places, and zeros at those of the others."""
    return _shaped("placed_rows", value, lambda: _all_rows(value))


def joined_rows(value: torch.Tensor, dim: int, members: int) -> torch.Tensor:
    """C(dim) -> R. All members' rows."""
    return _shaped("joined_rows", value, lambda: _all_rows(value))


def fetched_rows(
    value: torch.Tensor,
    index: torch.Tensor,
    sources: torch.Tensor | None,
    targets: torch.Tensor | None,
    members: int,
) -> torch.Tensor:
    """S(0) or C(0) -> S(0) or C(0). x[index]: the rows of all members that a member's part of the
    `index` (R) reads. Rows are cut by the starts `sources`, the index by `targets`; without them
    into equal parts. Each row is sent once to whoever reads it."""
    # A symbol where it is open: its length is a number.
    count = index.shape[0] // (members if targets is None else 1)
    return _shaped("fetched_rows", value, lambda: value.new_empty([count, *value.shape[1:]]))


def added_rows(
    value: torch.Tensor,
    into: torch.Tensor,
    index: torch.Tensor,
    sources: torch.Tensor | None,
    targets: torch.Tensor | None,
    members: int,
) -> torch.Tensor:
    """S(0) or C(0) -> S(0) or C(0). A member's part of what `into` becomes where all members' rows
    are added to it at the places of `index` (R), which are cut as they are, by `sources`; those of
    the result by `targets`. What goes to one place is added up before it is sent."""
    return _shaped("added_rows", value, lambda: _all_rows(into))


def _all_rows(value: torch.Tensor) -> torch.Tensor:
    return value.clone(memory_format=torch.contiguous_format)


def in_pieces(
    value: torch.Tensor, starts: torch.Tensor | None, members: int, dim: int = 0
) -> list[torch.Tensor]:
    """Every member's own of what is cut by starts, or into equal parts."""
    if starts is None:
        return [*value.chunk(members, dim)]
    return [*value.tensor_split(starts[1:].cpu(), dim)]


def from_the_start(index: torch.Tensor, known: bool, rows: int) -> torch.Tensor:
    """An index whose negative numbers, which count from the end, are numbers of rows. Raises
    IndexError for these where no member knows how many rows there are."""
    negative = index < 0
    if not known and negative.any():
        raise IndexError("an index of rows that data share out counts from their end")
    return torch.where(negative, index + rows, index) if known else index


def check_rows(value: torch.Tensor, starts: torch.Tensor | None, member: int) -> None:
    """Raises ValueError if a member has not as many rows as are between its start and the next."""
    if starts is not None and member + 1 < len(starts):
        expected = int(starts[member + 1] - starts[member])
        if len(value) != expected:
            raise ValueError(f"member {member} has {len(value)} rows, and {expected} are its own")


def reduced(values: Tensors, by: str = "sum") -> torch.Tensor:
    """All members' tensors as one, in their order."""
    return functools.reduce(torch.add if by == "sum" else torch.maximum, values)


def _placed(values: Tensors, dim: int) -> list[torch.Tensor]:
    """Each member's tensor at its place, with zeros at those of the others."""
    return [
        torch.cat([v if i == member else torch.zeros_like(v) for i, v in enumerate(values)], dim)
        for member in range(len(values))
    ]


def _alike(values: Tensors | None) -> torch.Tensor | None:
    """What all members have alike, of what each has."""
    return None if values is None else values[0]


def _fetched(
    values: Tensors, index: Tensors, sources: Tensors | None, targets: Tensors | None, members: int
) -> list[torch.Tensor]:
    positive = from_the_start(index[0], sources is None, sum(map(len, values)))
    pieces = in_pieces(positive, _alike(targets), members)
    for member, value in enumerate(values):
        check_rows(value, _alike(sources), member)
    whole = torch.cat([*values])
    return [whole[piece] for piece in pieces]


def _added(
    values: Tensors,
    into: Tensors,
    index: Tensors,
    sources: Tensors | None,
    targets: Tensors | None,
    members: int,
) -> list[torch.Tensor]:
    total = torch.cat([*into])
    for member, value in enumerate(into):
        check_rows(value, _alike(targets), member)
    positive = from_the_start(index[0], targets is None, len(total))
    pieces = in_pieces(positive, _alike(sources), members)
    for places, value in zip(pieces, values, strict=True):
        total = total + torch.zeros_like(total).index_add(0, places, value)
    return in_pieces(total, _alike(targets), members)


MEANING: Mapping[Callable[..., Any], Callable[..., list[torch.Tensor]]] = {
    member: lambda values, t: [
        torch.tensor(i, device=value.device) for i, value in enumerate(values)
    ],
    all_reduce: lambda values, t, by="sum": [_all_rows(reduced(values, by))] * t,
    all_gather: lambda values, dim, before, t: [Split(dim, t, before).join(values)] * t,
    part: lambda values, dim, before, t: [
        Split(dim, t, before).parts(value)[member] for member, value in enumerate(values)
    ],
    addend: lambda values, t: [
        torch.zeros_like(value) if member else value for member, value in enumerate(values)
    ],
    reduce_scatter: lambda values, dim, before, t: Split(dim, t, before).parts(reduced(values)),
    all_to_all: lambda values, old, before, new, after, t: Split(new, t, after).parts(
        Split(old, t, before).join(values)
    ),
    arrived: lambda values, *sent: [*values],
    shift: lambda values, by, t: [values[(i + by) % t].contiguous() for i in range(t)],
    own_rows: lambda values, starts, dim, t: [
        _all_rows(in_pieces(value, starts[0], t, dim)[i]) for i, value in enumerate(values)
    ],
    placed_rows: lambda values, starts, dim, t: _placed(values, dim),
    joined_rows: lambda values, dim, t: [torch.cat([*values], dim)] * t,
    fetched_rows: _fetched,
    added_rows: _added,
}


# What a member does alone, as it knows which one it is.
ALONE = frozenset({member, part, addend, own_rows, arrived})
# The others look at what members have before they know what is to be sent.
LASTING = frozenset({all_reduce, all_gather, reduce_scatter, all_to_all, shift})
_SMALL = 1 << 16  # bytes, of which a sum takes as long to send in one message as in parts


def begins(node: fx.Node) -> bool:
    """Whether a node is a collective that is under way up to where it has `arrived`."""
    return node.target in LASTING and [user.target for user in node.users] == [arrived]


def over_at(node: fx.Node) -> fx.Node | None:
    """The collective that has arrived at a node; None where nothing was under way."""
    begun = node.all_input_nodes[0] if node.target is arrived else None
    return begun if begun is not None and begins(begun) else None


def peers(collective: Callable[..., Any], members: int) -> int:
    """How many others a member sends each of its `messages` to."""
    return 1 if collective is shift else members - 1


def exchanged_bytes(rows: int, read: int, row: int, members: int) -> int:
    """About as many bytes as an exchange sends from each member to each other one: of so many rows
    of `row` bytes, of which an index reads so many, all alike, each once by a member."""
    return min(rows, read // members) // members * row


def messages(
    collective: Callable[..., Any], size: int, members: int, *, along_one: bool = False
) -> list[int]:
    """The bytes of the messages that a member sends to each of its `peers`, one after another,
    where it has a tensor of so many. A large sum of more than two is added up in parts, one by each
    member, which then tell one another these (Thakur et al., IJHPCA 2005). `along_one`: an
    all_to_all that cuts the same dimension into other blocks, for which all of it is gathered."""
    if collective in ALONE:
        return []
    if collective is placed_rows:
        return [8]  # how many rows it has
    if collective in (reduce_scatter, all_to_all) and not along_one:
        return [size // members]
    if collective is all_reduce and members > 2 and size > _SMALL:
        return [-(-size // members)] * 2
    return [size]


def scratch(collective: Callable[..., Any], value: torch.Tensor, *rest: Any) -> tuple[int, int]:
    """The bytes that a member needs for a collective, beside its tensor and the result: while the
    first messages are under way, and the most: what it sends, if that is a copy, and what it is
    sent (`links.collectives`)."""
    if collective in ALONE:
        return 0, 0
    size, shape = value.numel() * value.dtype.itemsize, value.shape
    members: int = rest[0] if collective is all_reduce else rest[-1]
    copy = 0 if value.is_contiguous() else size
    if collective is shift:
        return copy, copy
    if collective in (placed_rows, joined_rows, fetched_rows, added_rows):
        # At most: all of it to all, and as much of all; and what is found out of an index.
        index = {fetched_rows: 0, added_rows: 1}.get(collective)
        most = 2 * members * size + (0 if index is None else 8 * rest[index].nbytes)
        return most, most
    # Two swap. More gather, for which torch makes a flat copy of all that arrives.
    gathering = copy + (members if members == 2 else 2 * members) * size
    if collective is all_gather:
        ordered, result = Split(rest[0], members, rest[1]).in_order(shape), members * size
        return gathering - result, max(gathering - result, 0 if ordered else result)
    if collective is reduce_scatter:
        ordered = Split(rest[0], members, rest[1]).in_order(shape)
        sending = (copy if ordered else size) + size - size // members
        return sending, max(size, sending)
    if collective is all_to_all:
        old, new = Split(rest[0], members, rest[1]), Split(rest[2], members, rest[3])
        joining = 0 if old.in_order(old.local(shape)) else 1
        if old.dim == new.dim:  # all of it comes, of which a part is kept
            most = max(gathering, members * size * (1 + joining), (members + 1) * size)
            return gathering - size, most - size
        sending = copy if new.in_order(shape) else size
        return sending, max(sending, joining * size)
    if members == 2:
        return copy, copy
    if len(messages(collective, size, members)) == 1:
        return gathering - size, gathering - size
    padded = -(-value.numel() // members) * members * value.dtype.itemsize
    sent = max(copy, padded if padded > size else 0)
    sending = sent + padded - size
    return sending, max(sending, padded // members + 2 * padded - size)
