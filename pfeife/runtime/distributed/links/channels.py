"""The ends of the connections that carry messages: how a message goes over one.

A message over Gloo whose ranks share a node goes through memory that both map, if it is large:

    receiver                                              sender
    posts a receive of a byte, and tells
    which block of its memory is for the message   --->   copies the value into it
    has the value                                  <---   sends the byte

Both wait for messages of Gloo alone, and so are woken up and fail as for any other. The copy takes
a fraction of the processor's time that TCP takes, where the system copies twice.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from pfeife.lowering.envelope import APART, Envelope, Tensors
from pfeife.runtime.distributed.links import mapped
from pfeife.runtime.distributed.links.connection import FOREVER, Connection
from pfeife.runtime.distributed.links.sending import Sending
from pfeife.runtime.distributed.links.warm_up import way

_MESSAGE, _PLACE = 0, 2  # tags
# How many places of the receiver are listened for at once.
_AHEAD = 8

Works = Sequence[dist.Work | Sending]


class Incoming:
    """The receiver's end of a connection of two ranks; `blocks` where the sender maps them."""

    def __init__(self, connection: Connection, blocks: mapped.Blocks | None = None):
        self.connection, self.peer = connection, 1 - connection.place
        self.blocks = blocks

    def post(self, pieces: Sequence[torch.Tensor]) -> Works:
        """What is to be waited for until pieces of a message have their contents."""
        group, works = self.connection.group, list[dist.Work]()
        for piece in pieces:
            place = self.blocks and self.blocks.places.get(piece.data_ptr())
            if place:
                works.append(group.send([torch.tensor(place)], self.peer, _PLACE))
                piece = torch.empty(1, dtype=torch.uint8)
            works.append(group.recv([piece], self.peer, _MESSAGE))
        return works


class Outgoing:
    """The sender's end, whose messages go in the order in which they are given. From the first
    large one on a thread sends them while the rank computes: Gloo copies in the caller's time."""

    def __init__(self, connection: Connection, others: mapped.Others | None = None):
        self.connection, self.peer = connection, 1 - connection.place
        self.others = others
        self.thread: ThreadPoolExecutor | None = None
        self.told: deque[tuple[torch.Tensor, dist.Work]] = deque()
        for _ in range(_AHEAD if others else 0):
            self._listen()

    def send(self, values: Tensors, envelope: Envelope) -> tuple[Works, list[torch.Tensor]]:
        """The works that send a message, and its pieces, which must live as long."""
        pieces = envelope.pack(values)
        # From then on the thread sends all: messages must not overtake one another.
        if envelope.bytes >= APART and not self.connection.nccl and self.thread is None:
            self.thread = ThreadPoolExecutor(1, "pfeife sender")
        if self.thread is None:
            return [self._send(piece) for piece in pieces], pieces
        # The receiver has no blocks for what it learns of only when the opening has come.
        copied = envelope.opening.apart if self.others else ()
        sent = [
            self.thread.submit(self._copy if at in copied else self._send, piece)
            for at, piece in enumerate(pieces)
        ]
        return [Sending(future) for future in sent], pieces

    def close(self) -> None:
        """Lets go of the connection."""
        self.told.clear()
        if self.thread is not None:
            self.thread.shutdown(wait=False)

    def forget_unused(self) -> None:
        """Lets go of the receiver's memory that was not used since the last call."""
        if self.others:
            self.others.forget_unused()

    def _send(self, piece: torch.Tensor) -> dist.Work:
        return self.connection.group.send([piece], self.peer, _MESSAGE)

    @torch.no_grad()
    def _copy(self, piece: torch.Tensor) -> dist.Work:
        """Waits for the receiver to tell where to."""
        assert self.others is not None
        place, work = self.told.popleft()
        work.wait(FOREVER)
        self._listen()
        data = piece.reshape(-1).view(torch.uint8)
        number, file = place.tolist()
        self.others.block(number, file, len(data)).copy_(data)
        return self._send(torch.ones(1, dtype=torch.uint8))

    def _listen(self) -> None:
        place = torch.empty(2, dtype=torch.int64)
        self.told.append((place, self.connection.group.recv([place], self.peer, _PLACE)))


class Ends:
    """Those of one rank of a world, each made when it is first asked for."""

    def __init__(self, world: Any):
        self.world = world
        self.known: dict[Connection, Incoming | Outgoing] = {}
        self.blocks: mapped.Blocks | None = None  # once another rank maps them

    def of(self, source: int, destination: int) -> Incoming | Outgoing | None:
        """This rank's end of what one rank of the world sends another one, None if it is neither
        (collective)."""
        pair = sorted((source, destination))
        connection = self.world.connection_of(pair, way(source, destination))
        if connection.mine and connection not in self.known:
            make = self.outgoing if self.world.rank == source else self.incoming
            self.known[connection] = make(connection)
        return self.known.get(connection)

    def memory(self, size: int) -> torch.Tensor:
        """Where a large value arrives, whoever sends it: so many bytes."""
        if self.blocks is not None and size >= APART:
            return self.blocks.make(size)
        return torch.empty(size, dtype=torch.uint8, device=self.world.device)

    def close(self) -> None:
        """Sends nothing more; the threads end when what they have is sent or has failed."""
        for end in self.known.values():
            if isinstance(end, Outgoing):
                end.close()
        # Whoever keeps a step of a world that has failed, as Dynamo does, keeps no file of it.
        if self.blocks is not None:
            self.blocks.close()

    def incoming(self, connection: Connection) -> Incoming:
        """The receiver's, which asks the sender whether it can map blocks."""
        if connection.nccl:
            return Incoming(connection)
        blocks = self.blocks or (mapped.Blocks() if mapped.can_be_mapped() else None)
        identity = blocks.told() if blocks else mapped.empty_told()
        peer, answer = 1 - connection.place, torch.empty(1, dtype=torch.bool)
        self.world.wait(connection.group.send([identity], peer, _PLACE))
        self.world.wait(connection.group.recv([answer], peer, _PLACE))
        if not answer.item():
            return Incoming(connection)
        self.blocks = blocks
        return Incoming(connection, blocks)

    def outgoing(self, connection: Connection) -> Outgoing:
        """The sender's, which answers."""
        if connection.nccl:
            return Outgoing(connection)
        peer, identity = 1 - connection.place, mapped.empty_told()
        self.world.wait(connection.group.recv([identity], peer, _PLACE))
        receiver_blocks = mapped.found(identity)
        self.world.wait(
            connection.group.send([torch.tensor([receiver_blocks is not None])], peer, _PLACE)
        )
        return Outgoing(connection, receiver_blocks)
