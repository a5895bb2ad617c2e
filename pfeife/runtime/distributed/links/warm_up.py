"""The first use of NCCL's groups, which is when it connects their ranks.

The host waits for all members in the call that is the first one of its kind (NCCL_RUNTIME_CONNECT).
In a step it could so keep from one of them a message that this one needs to come there.
"""

from collections.abc import Callable

import torch

from pfeife import _torch
from pfeife.runtime.distributed.links.connection import Connection

# What connections are for; others are for broadcasts.
ALL_RANKS = ""
REDUCE = "reduce"
DOWN, UP = "down", "up"  # messages from the first of two ranks to the second one, and back


def way(source: int, destination: int) -> str:
    """What the connection is for over which one rank of the world sends another one messages."""
    return UP if source > destination else DOWN


def use_once(connection: Connection, purpose: str) -> None:
    """Does each operation that a connection is for, with a byte a rank (collective)."""
    size, device = len(connection.ranks), connection.device
    for use in _USES.get(purpose, (_broadcast,)):
        use(connection, torch.zeros(size, dtype=torch.uint8, device=device))


def _broadcast(connection: Connection, data: torch.Tensor) -> None:
    connection.group.broadcast(data, 0).wait()


def _gather(connection: Connection, data: torch.Tensor) -> None:
    _torch.gather_into(connection.group, torch.empty_like(data), data[:1]).wait()


def _exchange(connection: Connection, data: torch.Tensor) -> None:
    ones = [1] * len(data)
    connection.group.alltoall_base(torch.empty_like(data), data, ones, ones).wait()


def _message(sender: int) -> Callable[[Connection, torch.Tensor], None]:
    def use(connection: Connection, data: torch.Tensor) -> None:
        group, here = connection.group, connection.place
        call = group.send if here == sender else group.recv
        call([data[:1]], 1 - here, 0).wait()

    return use


_USES = {
    ALL_RANKS: (_broadcast, _gather),
    REDUCE: (_exchange, _gather, _broadcast),
    DOWN: (_message(0),),
    UP: (_message(1),),
}
