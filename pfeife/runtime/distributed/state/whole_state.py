"""Parameters that one member of a group keeps, and tells the others in each step.

            member 0               member 1
weight      [8, 4], the keeper     absent             the user's
in a step   rows 0 to 3 <--------> rows 4 to 7        `Message`: the keeper tells them
gradient    of rows 0 to 3         of rows 4 to 7
.grad       [8, 4] <-------------- absent             the keeper is told (`links.reducing`)

What is not cut the keeper tells the others as a whole; of its gradient all have the sum, which the
keeper alone needs.
"""

from collections.abc import Iterator

import torch

from pfeife.ir.evaluate import State
from pfeife.ir.parts import Port
from pfeife.lowering.telling import Telling, aligned
from pfeife.runtime.distributed.control.packing import pack, views
from pfeife.runtime.distributed.links.connection import Connection, finished
from pfeife.runtime.step import Layouts


class Message:
    """What is told at one time, on its way: memory for it is there from the beginning.

            parts                                              wholes
    sent    [members, what this one keeps], row j for j        what this one keeps
    rooms   what member 0 keeps, what member 1 keeps, ...      the same; of its own none
    """

    def __init__(self, telling: Telling, state: State, connection: Connection):
        self.telling, self.connection = telling, connection
        here, device = connection.place, connection.device
        self.own = {port.fqn: state[port.fqn] for port in telling.kept[here]}
        sizes = list(map(telling.bytes, range(len(telling.kept))))
        if telling.cut:
            self.room = _bytes(sum(sizes), device)
            self.rooms = self.room.split(sizes)
            self.sent = self._parts(_bytes(telling.packed_bytes(here), device))
        else:
            self.rooms = tuple(_bytes(0 if m == here else n, device) for m, n in enumerate(sizes))
            self.sent = pack(list(self.own.values()), device)

    def _parts(self, sent: torch.Tensor) -> torch.Tensor:
        rows, at = sent.view(len(self.rooms), -1), 0
        for port in self.telling.kept[self.connection.place]:
            assert port.split is not None
            if not port.part_bytes:
                continue  # bytes of nothing are no numbers of another type
            parts = rows[:, at : at + port.part_bytes].view(port.given_dtype)
            port.split.scatter(self.own[port.fqn].detach(), parts.unflatten(1, port.shape))
            at += aligned(port.part_bytes)
        return sent

    def run(self) -> None:
        """Sends what this member keeps, and is told what others do."""
        group, here = self.connection.group, self.connection.place
        if self.telling.cut:
            arriving = [len(room) for room in self.rooms]
            sent = [arriving[here]] * len(arriving)
            finished(
                self.connection,
                group.alltoall_base(self.room, self.sent, arriving, sent),
                self.sent,
            )
            return
        messages = [self.sent if m == here else room for m, room in enumerate(self.rooms)]
        for work in [group.broadcast(each, m) for m, each in enumerate(messages) if len(each)]:
            finished(self.connection, work, self.sent)

    def values(self, layouts: Layouts) -> Iterator[tuple[str, torch.Tensor]]:
        """What the program computes with, by names; wholes in the `layouts` of which it was
        made."""
        cut, here = self.telling.cut, self.connection.place
        for member, (ports, room) in enumerate(zip(self.telling.kept, self.rooms, strict=True)):
            if member == here and not cut:
                yield from self.own.items()
                continue
            for port, value in zip(ports, views(room, map(_meant, ports)), strict=True):
                yield port.fqn, _laid_out(value, None if cut else layouts[port.fqn])


def _bytes(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _meant(port: Port) -> torch.Tensor:
    """As a program computes with it, but for what it is cast to."""
    return torch.empty(port.shape, dtype=port.given_dtype, device="meta")


def check_kept(port: Port, value: torch.Tensor) -> None:
    """Raises ValueError for a value that is another one than the program says."""
    # The others would wait for other parts, or take the bytes of these for those of other numbers.
    if value.shape != port.given_shape or value.dtype != port.given_dtype:
        raise ValueError(
            f"{port.fqn} has the shape {list(value.shape)} in {value.dtype}, the program was "
            f"captured for {list(port.given_shape)} in {port.given_dtype}"
        )


def _laid_out(value: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """A value with its dimensions in the order in memory that those of another one have: the
    program may read it as it lies there."""
    if like is None or like.is_contiguous():
        return value
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    back = sorted(range(like.dim()), key=order.__getitem__)
    return value.permute(order).contiguous().permute(back)
