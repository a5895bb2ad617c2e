"""Memory that other processes of a node can map: what they write there has arrived.

A block is an anonymous file, which the system frees with the last process that has it, however that
ends. Others open it by its owner's process and file number, as the same user.
"""

import itertools
import os
import weakref
from typing import Any

import torch

_PATTERN = 16  # bytes by which a process knows that it has found another one's memory


class Blocks:
    """This process's blocks. A block is its own as long as its tensor lives."""

    def __init__(self) -> None:
        self.places: dict[int, tuple[int, int]] = {}  # by their address a number and a file
        self.numbers = itertools.count(1)
        self.pattern = self.make(_PATTERN)
        # The system's random numbers: those of torch's generator are the user's.
        self.pattern.copy_(torch.tensor(list(os.urandom(_PATTERN)), dtype=torch.uint8))

    def make(self, size: int) -> torch.Tensor:
        """Memory of so many bytes."""
        file = os.memfd_create("pfeife")
        os.ftruncate(file, size)
        memory = _opened(os.getpid(), file, size)
        address = memory.data_ptr()
        self.places[address] = next(self.numbers), file
        weakref.finalize(memory, _close, self.places, address)  # which must not keep the blocks
        return memory

    def told(self) -> torch.Tensor:
        """What `found` reads in another process."""
        _, file = self.places[self.pattern.data_ptr()]
        return torch.tensor([os.getpid(), file, *self.pattern.tolist()])

    def close(self) -> None:
        """Lets go of what others know this process by: they open no more blocks."""
        self.pattern = torch.empty(0, dtype=torch.uint8)


def _close(places: dict[int, tuple[int, int]], address: int) -> None:
    os.close(places.pop(address)[1])


def can_be_mapped() -> bool:
    """Whether the system has such memory, as Linux does."""
    return hasattr(os, "memfd_create")


def empty_told() -> torch.Tensor:
    """What `Blocks.told` is received into; zeros are of nobody."""
    return torch.zeros(2 + _PATTERN, dtype=torch.int64)


def found(identity: torch.Tensor) -> "Others | None":
    """The blocks of the process that has told of itself, None if they cannot be opened here: it is
    on another node, or shut off in a container, or another user's."""
    process, file, *pattern = identity.tolist()
    try:
        same = _opened(process, file, _PATTERN).tolist() == pattern
    except (OSError, RuntimeError):
        return None
    return Others(process) if same else None


class Others:
    """Another process's blocks, as they are mapped here."""

    def __init__(self, process: int):
        self.process = process
        self.known: dict[int, torch.Tensor] = {}  # by their numbers
        self.used: set[int] = set()

    def block(self, number: int, file: int, size: int) -> torch.Tensor:
        """The memory of a block that its owner keeps. Raises RuntimeError if it does not."""
        if number not in self.known:
            try:
                self.known[number] = _opened(self.process, file, size)
            except OSError as error:
                raise RuntimeError(f"the receiver's memory has gone: {error}") from error
        self.used.add(number)
        return self.known[number]

    def forget_unused(self) -> None:
        """Lets go of the blocks that were not used since the last call: their owner may have."""
        for number in self.known.keys() - self.used:
            del self.known[number]
        self.used.clear()


def _opened(process: int, file: int, size: int) -> torch.Tensor:
    path = f"/proc/{process}/fd/{file}"
    if os.stat(path).st_size != size:  # from_file would make it as long
        raise RuntimeError(f"{path} is not the memory of {size} bytes that was told of")
    storage: Any = torch.UntypedStorage.from_file(path, True, size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)
