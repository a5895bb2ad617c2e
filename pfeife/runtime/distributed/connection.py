"""Process groups whose waits can be ended."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pfeife import _torch

FOREVER = timedelta(days=1)  # of a wait that a thread ends, by cutting the connection
_CUT = 2**30  # the tag of the receives that nobody ever answers
_PAUSE = 5e-5  # seconds between two questions whether the GPU has done something


class Connection:
    """A process group of ours that can be cut: then all that waits for its messages fails.

    Gloo has no such call, but the timeout of one receive fails all that its group is doing. So
    there are some that nobody ever answers, one from each of the others: that from a rank which
    has gone fails by itself, and fails nothing else. Gloo's groups are made without
    torch.distributed's list of groups: that names them by their number, which ranks that failed at
    other moments do not agree on, and holds their sockets for ever. `gloo` is the device that
    looks after the connections.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        device: torch.device,
        timeout: float,
        store: dist.Store,
        purpose: str,
        gloo: Any = None,
    ):
        self.ranks, self.device = tuple(ranks), device
        self.mine = dist.get_rank() in self.ranks
        limit = timedelta(seconds=timeout)
        self.group: Any = None
        if device.type == "cuda":
            made = dist.new_group(self.ranks, timeout=limit)
            self.group = made if self.mine else None
        elif self.mine:
            own = dist.PrefixStore(f"{self.ranks} {purpose}", store)
            place = self.index(dist.get_rank())
            self.group = _torch.gloo_group(own, place, len(self.ranks), limit, gloo)
        if self.mine:  # how long to wait is decided where it is waited
            self.group.set_timeout(FOREVER)
        self.lock = threading.Lock()
        self.never: list[dist.Work] = []
        if self.mine and device.type != "cuda":
            others = [self.index(rank) for rank in self.ranks if rank != dist.get_rank()]
            self.never = [self.group.recv([torch.zeros(1)], other, _CUT) for other in others]

    def index(self, rank: int) -> int:
        """A rank of the world as the group counts."""
        return self.ranks.index(rank)

    def cut(self) -> None:
        """Fails all that waits for a message, or will."""
        with self.lock:
            while self.never:
                with contextlib.suppress(RuntimeError):
                    self.never.pop().wait(timedelta(milliseconds=1))
            if self.group is not None and self.device.type == "cuda":
                self.group.abort()

    def close(self) -> None:
        """Lets go of the group, whose sockets and threads end when nobody waits for it."""
        with self.lock:
            self.never, self.group = [], None


def wait_for_queued(work: dist.Work, check: Callable[[], None]) -> None:
    """Until NCCL has done something, as long as `check` does not raise. It is asked: `wait` with a
    time aborts the communicator when that is over, though the others may only be late; without a
    time it keeps the stream waiting, not this thread, which reads what has come next."""
    while not work.is_completed():
        check()
        time.sleep(_PAUSE)
    check()  # what was aborted is over too
    work.wait()
