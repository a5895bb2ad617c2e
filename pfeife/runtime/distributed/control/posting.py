"""Texts and tensors between two ranks, one after another."""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import distributed as dist

from pfeife.data import plain
from pfeife.runtime.distributed.control.questions import Shaped, as_bytes, text_bytes, text_of
from pfeife.runtime.distributed.links.connection import FOREVER, Connection

NEVER = 1  # the tag of a text that nobody sends; answers have those that the questions say
OVER = ""  # the last text that a rank leaves, for itself


def texts(store: dist.Store, rank: int) -> Iterator[str]:
    """The texts that any rank leaves for this one, until it leaves `OVER` for itself. Raises
    RuntimeError if the store is gone, which nobody else uses from this thread."""
    # Gloo has a receive from any rank, but no way to end it when nobody sends any more. A wait of
    # the store's that comes to its end without a text warns of that on standard error, so it is
    # ended by one.
    store.set_timeout(FOREVER)
    for count in itertools.count(1):
        key = f"text {rank} {count}"
        text = store.get(key).decode()  # which waits for it
        if text == OVER:  # whoever is next waits already, and the store does one thing at a time
            return
        store.delete_key(key)
        yield text


def leave(store: dist.Store, rank: int, text: str) -> int:
    """Leaves a text for a rank in a store; gives how many there have been."""
    # The store counts, so that two ranks that leave a text at once get different keys.
    count = int(store.add(f"texts {rank}", 1))
    store.set(f"text {rank} {count}", text)
    return count


class Post:
    """Messages over a connection of all ranks, on the CPU: first the length of a text, then the
    text, then the bytes of each tensor that it tells of. Everything raises RuntimeError when the
    other rank is gone or the connection was cut."""

    def __init__(self, connection: Connection):
        self.connection = connection

    def send(self, rank: int, tag: int, text: str, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Returns when all has been taken."""
        data = text_bytes(text)
        # The length first: the other end has no other way to know how much to receive.
        head = torch.tensor([len(data)])
        dense = (
            as_bytes(tensor.detach().cpu().contiguous()) for tensor in tensors if tensor.numel()
        )
        for piece in itertools.chain((head, data), dense):
            self._group().send([piece], rank, tag).wait(FOREVER)

    def text(self, rank: int, tag: int) -> str:
        """The next text of a rank."""
        head = torch.zeros(1, dtype=torch.int64)
        self._group().recv([head], rank, tag).wait(FOREVER)
        length = int(head)
        if not 0 < length <= plain.LARGEST_FILE:
            raise ValueError(f"rank {rank} sends a text of {length} bytes")
        data = torch.empty(length, dtype=torch.uint8)
        self._group().recv([data], rank, tag).wait(FOREVER)
        return text_of(data)

    def tensor(self, rank: int, tag: int, layout: Shaped) -> torch.Tensor:
        """The next tensor of a rank, as it was told of. Raises ValueError for what is none."""
        dense = layout.empty()
        if dense.numel():
            self._group().recv([as_bytes(dense)], rank, tag).wait(FOREVER)
        return layout.laid_out(dense)

    def _group(self) -> "torch.distributed.ProcessGroup":
        group = self.connection.group
        if group is None:
            raise RuntimeError("the connection is closed")
        return group
