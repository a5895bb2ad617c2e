"""Texts and tensors between two ranks, one after another."""

import itertools
from collections.abc import Sequence

import torch

from pfeife.data import plain
from pfeife.runtime.distributed.connection import FOREVER, Connection
from pfeife.runtime.distributed.questions import Shaped, as_bytes

QUESTION = 1  # the tag of questions; answers have those that the questions say
NEVER = 2  # that of a text that nobody sends


class Post:
    """Messages over a connection of all ranks, on the CPU: first who sends a text and its length,
    then the text, then the bytes of each tensor that it tells of. Everything raises RuntimeError
    when the other rank is gone or the connection was cut."""

    def __init__(self, connection: Connection):
        self.connection = connection

    def send(self, rank: int, tag: int, text: str, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Returns when all has been taken."""
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        head = torch.tensor([self.connection.place, len(data)])
        dense = (as_bytes(one.detach().cpu().contiguous()) for one in tensors if one.numel())
        for piece in itertools.chain((head, data), dense):
            self._group().send([piece], rank, tag).wait(FOREVER)

    def text(self, tag: int, rank: int | None = None) -> tuple[int, str]:
        """The next text of a rank, or of whichever sends one, and that rank."""
        head, group = torch.zeros(2, dtype=torch.int64), self._group()
        if rank is None:
            group.recv_anysource([head], tag).wait(FOREVER)
        else:
            group.recv([head], rank, tag).wait(FOREVER)
        sender, length = map(int, head)
        if not 0 < length <= plain.LARGEST_FILE:
            raise ValueError(f"rank {sender} sends a text of {length} bytes")
        data = torch.empty(length, dtype=torch.uint8)
        self._group().recv([data], sender, tag).wait(FOREVER)
        return sender, bytes(data.numpy()).decode()

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
