"""Process groups whose waits can be ended."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pfeife import _torch
from pfeife.runtime.threads import started

log = logging.getLogger("pfeife")

FOREVER = timedelta(days=1)  # of a wait that a thread ends, by cutting the connection
_CUT = 2**30  # the tag of the receives that nobody ever answers
_SLICE = timedelta(seconds=1)  # after which a thread looks whether its connection is cut
_PAUSE = 5e-5  # seconds between two questions whether the GPU has done something
_ENDS = 1.0  # seconds in which a group of Gloo's ends, if it does


class Connection:
    """A process group of ours that can be cut: then all that waits for its messages fails.

    Gloo has no such call, but the timeout of one receive fails all that its group is doing. So
    there are some that nobody ever answers, one from each of the others: that from a rank which
    has gone fails by itself, and fails nothing else. Gloo's groups are made without
    torch.distributed's list of groups: that names them by their number, which ranks that failed at
    other moments do not agree on, and holds their sockets for ever. `gloo` is the device that
    looks after the connections. What it sends to a rank that has gone may never be over, and then
    the end of its group never is: so a thread keeps a group after a failure, and is the last to.

    Without one the group is NCCL's, made without that list for the same reason. It is cut by its
    abort, which may take as long as the group's timeout, or never return, or raise: so a thread
    calls it, once.
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
        self.nccl = gloo is None
        limit = timedelta(seconds=timeout)
        self.group: Any = None
        if self.mine:
            prefixed = dist.PrefixStore(f"{self.ranks} {purpose}", store)
            self.place = self.index(dist.get_rank())  # this rank, as the group counts
            member = prefixed, self.place, len(self.ranks), limit
            self.group = (
                _torch.nccl_group(*member) if self.nccl else _torch.gloo_group(*member, gloo)
            )
            self.group.set_timeout(FOREVER)  # how long to wait is decided where it is waited
        self.is_cut = False
        self.lock = threading.Lock()
        self.ending = False  # whether NCCL has been told
        self.closed = threading.Event()
        self.keeping: threading.Thread | None = None
        self.never: list[dist.Work] = []
        if self.mine and not self.nccl:
            peers = [self.index(rank) for rank in self.ranks if rank != dist.get_rank()]
            self.never = [self.group.recv([torch.zeros(1)], peer, _CUT) for peer in peers]

    def index(self, rank: int) -> int:
        """A rank of the world as the group counts."""
        return self.ranks.index(rank)

    def cut(self, *, keep: bool = False) -> None:
        """Fails all that waits for a message, or will; with `keep` after a failure."""
        self.is_cut = True
        with self.lock:
            if keep and self.never:
                with contextlib.suppress(RuntimeError):  # no new thread as the process ends
                    self.keeping = started("keeps", _kept, self.group, self.closed)
            while self.never:
                with contextlib.suppress(RuntimeError):
                    self.never.pop().wait(timedelta(milliseconds=1))
            self._end("abort")

    def close(self) -> threading.Thread | None:
        """Lets go of the group, whose sockets and threads end when nobody waits for it; a thread
        waits for what NCCL has not done yet, which takes the other ranks."""
        with self.lock:
            ending = self._end("shutdown")
            self.never.clear()
            self.group = None
        self.closed.set()
        if self.keeping is not None:
            self.keeping.join(_ENDS)
        return ending

    def _end(self, how: str) -> threading.Thread | None:
        """Calls a method of NCCL's group, the first that it is called with, on a thread that keeps
        the group."""
        if self.group is None or not self.nccl or self.ending:
            return None
        # Once: neither an abort nor a shutdown need ever return.
        self.ending = True
        return started(how, _called, self.group, how, self.device)


def _kept(group: Any, closed: threading.Event) -> None:
    """Lets go of a group after all others have, or never if the process ends before."""
    closed.wait()


def _called(group: Any, how: str, device: torch.device) -> None:
    try:
        if device.type == "cuda":  # a thread begins on the first one
            torch.cuda.set_device(device)
        getattr(group, how)()
    except RuntimeError as error:
        log.info("%s of a process group: %s", how, error)


def goes_by_nccl(device: torch.device) -> bool:
    """Whether NCCL carries what is between ranks on such devices."""
    return device.type == "cuda"


def queued_by_now(device: torch.device) -> Any:
    """An event after all that is queued on a device by now."""
    return torch.cuda.current_stream(device).record_event()


def finished(connection: Connection, work: Any, like: torch.Tensor) -> None:
    """Waits for a collective, until that is over or its connection is cut; on CUDA the stream does,
    and NCCL's watchdog looks after it."""
    if like.is_cuda:
        work.wait()
        return
    while True:
        over = work.is_completed()  # then an error is its own, not that of the time
        try:
            return work.wait(_SLICE)
        except RuntimeError:
            # What Gloo sends to a rank that has gone may never be over, nor fail.
            if over or connection.is_cut:
                raise


def wait_for_queued(work: dist.Work, check: Callable[[], None]) -> None:
    """Until NCCL has done something, as long as `check` does not raise. It is asked: `wait` with a
    time aborts the communicator when that is over, though the others may only be late; without a
    time it keeps the stream waiting, not this thread, which reads what has come next."""
    while not work.is_completed():
        check()
        time.sleep(_PAUSE)
    check()  # what was aborted is over too
    work.wait()
