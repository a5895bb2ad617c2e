"""A call whose arguments rank 0 alone is given: the others are told of them, and sent what they
read."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pfeife.runtime.distributed.batches.rank0_broadcast import (
    Announced,
    share,
)
from pfeife.runtime.distributed.control.packing import empty, pack, unpack
from pfeife.runtime.distributed.links.connection import FOREVER, Connection
from pfeife.runtime.distributed.liveness.heartbeat import Activity
from pfeife.runtime.distributed.world.world import World

_PLACE = "the values of the batch of rank 0"


class Sent:
    """The tensors among the arguments of one call: those of rank 0 there, room for them on the
    other ranks."""

    def __init__(self, world: World, tensors: Sequence[torch.Tensor]):
        self.world, self.tensors = world, tensors
        self.whole = False

    def __contains__(self, value: Any) -> bool:
        return any(tensor is value for tensor in self.tensors)

    def everything(self) -> None:
        """All values to all ranks, if they have not got them (collective)."""
        if not self.whole:
            with self.world.building(_PLACE):
                self.world.agreed("", _PLACE)
                share(self.world, self.tensors)
        self.whole = True

    def parts(self, read: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """To each rank those values that it reads, by views of the tensors of this call."""
        if self.whole:
            return
        with self.world.busy(lambda: Activity(_PLACE)):
            connection = self.world.connection_of(
                range(self.world.size), "batch", torch.device("cpu")
            )
            with self.world.reaching(0 if self.world.rank else None):
                if self.world.rank == 0:
                    self._send(connection, read)
                elif read[self.world.rank]:
                    self._receive(connection, read[self.world.rank])

    def _send(self, connection: Connection, read: Mapping[int, Sequence[torch.Tensor]]) -> None:
        # Kept until all is sent: Gloo reads from their memory meanwhile.
        messages = {rank: pack(views) for rank, views in read.items() if rank and views}
        works = [connection.group.send([message], rank, 0) for rank, message in messages.items()]
        for work in works:
            work.wait(FOREVER)

    def _receive(self, connection: Connection, views: Sequence[torch.Tensor]) -> None:
        message = empty(views)
        connection.group.recv([message], 0, 0).wait(FOREVER)
        unpack(message, views)


class CallOfRankZero:
    """What rank 0 gives a step, for all ranks."""

    def __init__(self, name: str):
        self.announced = Announced(f"a call of {name}, of which rank 0 has the batch")

    def __call__(
        self, world: World, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Sent]:
        """Rank 0's arguments, on every rank (collective); those that the others were given do not
        count. Raises CollectiveError for what cannot be sent."""
        announcement = self.announced(world, lambda: [args, dict(kwargs)])
        assert announcement is not None
        structure, tensors = announcement
        tensors = structure.empty(world.device) if world.rank else tensors
        positional, named = structure.filled(tensors)
        return positional, named, Sent(world, tensors)
