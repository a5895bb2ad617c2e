"""Texts and tensors between two ranks, one after another."""

import itertools
from collections.abc import Sequence

import torch

from pfeife.data import plain
from pfeife.runtime.distributed.connection import FOREVER, Connection
from pfeife.runtime.distributed.questions import Shaped, as_bytes


class Post:
    """Messages over a connection of all ranks, on the CPU: first the length of a text, then the
    text, then the bytes of each tensor that it tells of. Everything raises RuntimeError when the
    other rank is gone or the connection was cut."""

    def __init__(self, connection: Connection):
        self.connection = connection

    def send(self, rank: int, tag: int, text: str, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Returns when all has been taken."""
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        dense = (as_bytes(one.detach().cpu().contiguous()) for one in tensors if one.numel())
        for piece in itertools.chain((torch.tensor([len(data)]), data), dense):
            self._group().send([piece], rank, tag).wait(FOREVER)

    def text(self, rank: int, tag: int) -> str:
        """The next text of a rank."""
        length = torch.zeros(1, dtype=torch.int64)
        self._group().recv([length], rank, tag).wait(FOREVER)
        if not 0 < int(length) <= plain.LARGEST_FILE:
            raise RuntimeError(f"rank {rank} sends a text of {int(length)} bytes")
        data = torch.empty(int(length), dtype=torch.uint8)
        self._group().recv([data], rank, tag).wait(FOREVER)
        return bytes(data.numpy()).decode()

    def tensor(self, rank: int, tag: int, told: Shaped) -> torch.Tensor:
        """The next tensor of a rank, as it was told of. Raises ValueError for what is none."""
        found = told.empty()
        if found.numel():
            self._group().recv([as_bytes(found)], rank, tag).wait(FOREVER)
        return told.laid_out(found)

    def _group(self) -> "torch.distributed.ProcessGroup":
        group = self.connection.group
        if group is None:
            raise RuntimeError("the connection is closed")
        return group
