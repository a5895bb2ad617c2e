"""State that one member of a group keeps, where a program reads and gives parts.

            member 0               member 1
weight      [8, 4], the keeper     absent             the user's
in a step   rows 0 to 3 <--------> rows 4 to 7        `own_parts`: the keeper tells them
gradient    of rows 0 to 3         of rows 4 to 7
.grad       [8, 4] <-------------- absent             `whole_gradients`: the keeper is told

What is not cut the keeper tells the others as a whole, once for all microbatches; of its gradient
all have the sum, which the keeper alone needs.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from pfeife.ir.evaluate import State
from pfeife.ir.parts import Port
from pfeife.lowering.buckets import told_together
from pfeife.runtime.distributed.control.packing import empty, pack, views
from pfeife.runtime.distributed.links.collectives import Group


def own_parts(
    ports: Iterable[Port],
    layouts: Mapping[str, torch.Tensor | None],
    state: State,
    group: Group,
    device: torch.device,
) -> State:
    """The state with a member's own parts of what one of them keeps (collective among them), whole
    ones in `layouts` of which the program was made, by names."""
    own = dict(state)
    for together in told_together(ports):
        cut = [port for port in together if port.split]
        if cut:
            own |= _told(cut, state, group, device)
        whole = [port for port in together if not port.split]
        for name, value in _announced(whole, state, group, device).items():
            own[name] = _laid_out(value, layouts[name])
    return own


def _laid_out(value: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """A value with its dimensions in the order in memory that those of another one have: the
    program may read it as it lies there."""
    if like is None or like.is_contiguous():
        return value
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    back = sorted(range(like.dim()), key=order.__getitem__)
    return value.permute(order).contiguous().permute(back)


def _announced(ports: Sequence[Port], state: State, group: Group, device: torch.device) -> State:
    """Whole values, of which keepers tell the others: one message of each keeper."""
    connection = group.group
    assert connection is not None
    own: dict[str, torch.Tensor] = {}
    under_way = []
    for member in range(len(connection.ranks)):
        kept = [port for port in ports if port.keeper == member]
        if not kept:
            continue
        if member == connection.place:
            message = pack([_checked(port, state[port.fqn]) for port in kept], device)
        else:
            meant = [torch.empty(p.shape, dtype=p.given_dtype, device="meta") for p in kept]
            message = empty(meant, device)
            names = (port.fqn for port in kept)
            own |= zip(names, views(message, meant), strict=True)
        under_way.append((connection.group.broadcast(message, member), message))
    for work, _ in under_way:
        group.wait(work)
    return own


def _told(ports: Sequence[Port], state: State, group: Group, device: torch.device) -> State:
    """A member's parts of values, of each of which its keeper has the whole.

    sent      [members, bytes of all that it keeps]      row j is for member j
    arrived   what member 0 keeps, what member 1 keeps, ...
    """
    connection = group.group
    assert connection is not None
    here, members = connection.place, range(len(connection.ranks))
    kept = [[port for port in ports if port.keeper == member] for member in members]
    stacks = [_stacked(port, state[port.fqn]) for port in kept[here]]
    arriving = [sum(port.part_bytes for port in each) for each in kept]
    arrived = torch.empty(sum(arriving), dtype=torch.uint8, device=device)
    sent = _rows(stacks).flatten() if stacks else arrived[:0]
    group.wait(
        connection.group.alltoall_base(arrived, sent, arriving, [arriving[here]] * len(kept))
    )
    in_order = [port for each in kept for port in each]
    pieces = arrived.split([port.part_bytes for port in in_order])
    return {
        port.fqn: _own(piece).view(port.given_dtype).view(port.shape)
        for port, piece in zip(in_order, pieces, strict=True)
    }


def _stacked(port: Port, value: torch.Tensor) -> torch.Tensor:
    """Every member's part of what this one keeps."""
    assert port.split is not None
    return port.split.stacked(_checked(port, value))


def _checked(port: Port, value: torch.Tensor) -> torch.Tensor:
    """A value that is as the program says."""
    # The others would wait for other parts, or take the bytes of these for those of other numbers.
    if value.shape != port.given_shape or value.dtype != port.given_dtype:
        raise ValueError(
            f"{port.fqn} has the shape {list(value.shape)} in {value.dtype}, the program was "
            f"captured for {list(port.given_shape)} in {port.given_dtype}"
        )
    return value


def _rows(stacks: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of several tensors, by their first dimension: one row for each place in it."""
    rows = [stack.flatten(1).view(torch.uint8) for stack in stacks]
    return torch.cat(rows, 1) if len(rows) > 1 else rows[0]


def _own(piece: torch.Tensor) -> torch.Tensor:
    """Some bytes in memory of their own, where kernels want them to begin."""
    return piece if len(piece) == piece.untyped_storage().nbytes() else piece.clone()


def whole_gradients(
    ports: Iterable[Port], gradients: Mapping[str, torch.Tensor], group: Group
) -> dict[str, torch.Tensor]:
    """A member's gradients: of what one of them keeps, that has the whole, made of all parts
    (collective among the members)."""
    by_name = {port.fqn: port for port in ports}
    whole = dict(gradients)
    for together in told_together(by_name[name] for name in gradients if by_name[name].split):
        whole |= _gathered(together, gradients, group)
    here = group.group.place if group.group else None
    return {
        name: gradient for name, gradient in whole.items() if by_name[name].keeper in (None, here)
    }


def _gathered(
    ports: Sequence[Port], gradients: Mapping[str, torch.Tensor], group: Group
) -> dict[str, torch.Tensor]:
    """The whole gradients of what this member keeps.

    sent      what it has of what member 0 keeps, of what member 1 keeps, ...
    arrived   [members, bytes of all that it keeps]      row j is of member j
    """
    connection = group.group
    assert connection is not None
    here, members = connection.place, len(connection.ranks)
    kept = [[port for port in ports if port.keeper == member] for member in range(members)]
    parts = [[gradients[port.fqn].unsqueeze(0).contiguous() for port in each] for each in kept]
    lengths = [[part.nbytes for part in each] for each in parts]
    sent = _rows([part for each in parts for part in each]).flatten()
    sending = list(map(sum, lengths))
    arrived = sent.new_empty((members, sending[here]))
    arriving = [sending[here]] * members
    group.wait(connection.group.alltoall_base(arrived.flatten(), sent, arriving, sending))
    whole = {}
    pairs = zip(kept[here], parts[here], arrived.split(lengths[here], 1), strict=True)
    for port, part, pieces in pairs:
        assert port.split is not None
        stack = pieces.flatten().view(part.dtype).view(members, *port.shape)
        whole[port.fqn] = port.split.joined(stack)
    return whole
