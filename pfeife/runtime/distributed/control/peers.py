"""The processes that work together: they agree, wait for one another and stop together.

What a rank is at, and for whom it waits there, is a stack:

    step(batch)                 busy: "the inputs of a step"
                                busy: "action 0F0 (...)"
      a message of rank 1         waiting for 1, inside of that      <- what the other threads see
"""

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist

from pfeife import _torch
from pfeife.runtime.distributed.control.agreement import AllRanks
from pfeife.runtime.distributed.control.posting import OVER, leave
from pfeife.runtime.distributed.control.script_point import Rest, Script
from pfeife.runtime.distributed.links.channels import Ends
from pfeife.runtime.distributed.links.connection import (
    FOREVER,
    Connection,
    goes_by_nccl,
    queued_by_now,
    wait_for_queued,
)
from pfeife.runtime.distributed.links.reducing import Reducer
from pfeife.runtime.distributed.links.warm_up import ALL_RANKS, use_once
from pfeife.runtime.distributed.liveness import diagnosis
from pfeife.runtime.distributed.liveness.ending import end_process
from pfeife.runtime.distributed.liveness.heartbeat import (
    ALL,
    BUILDING,
    INTERVAL,
    OUTSIDE,
    Activity,
    Monitor,
)
from pfeife.runtime.distributed.liveness.keepalive import SILENCE, Lifelines
from pfeife.runtime.distributed.liveness.rendezvous import rendezvous
from pfeife.runtime.distributed.liveness.watchdog import WaitWatchdog
from pfeife.runtime.failure import CollectiveError, Failure, PipelineError, failure_of

log = logging.getLogger("pfeife")

GRACE = 7.0  # seconds that a rank has to come out of its step when another one has failed
_TICK = 0.05  # seconds
SLICE = timedelta(seconds=INTERVAL)


class Busy(ABC):
    """What a rank is at: a stack, the innermost last. The threads that look after the rank read its
    end, and never find it empty; `waited` are the seconds that the rank has waited so far, for
    messages and for all ranks. Outside of all this it runs its script, which `doing` tells of."""

    def __init__(self, doing: Callable[[], Activity]) -> None:
        self.doing = doing
        self.looks: list[Callable[[], Activity]] = [_outside]
        self.waited = 0.0

    @abstractmethod
    def check(self) -> None:
        """Raises PipelineError if any rank has failed."""

    @abstractmethod
    def failed(self, error: BaseException, where: str) -> None:
        """Stops all ranks, since this one has raised an exception."""

    @abstractmethod
    def lost(self, peer: int | None, error: RuntimeError) -> PipelineError:
        """The error to raise when a message from or to a rank of the world (None if it is not
        known which) has failed."""

    @property
    def inside(self) -> bool:
        """Whether a thread is at something that other ranks may wait for."""
        return len(self.looks) > 1

    def look(self) -> Activity:
        """What this rank is at. Other threads ask."""
        doing = self.looks[-1]()
        return self.doing() if doing == _outside() else doing

    @contextlib.contextmanager
    def at(self, look: Callable[[], Activity]) -> Iterator[None]:
        """While the calling thread is at what `look` tells."""
        self.looks.append(look)
        try:
            yield
        finally:
            # Not the last one: another thread may have come in between.
            self.looks.remove(look)

    def waiting(self, rank: int) -> "Waiting":
        """While the calling thread waits for a rank of the world, or for `ALL`. Raises as
        `reaching`."""
        return Waiting(self, rank)

    def reaching(self, rank: int | None) -> "Reaching":
        """While messages go from or to a rank of the world, None for one that is not known. Raises
        PipelineError, which says why, where one fails."""
        return Reaching(self, rank)

    @contextlib.contextmanager
    def busy(self, look: Callable[[], Activity]) -> Iterator[None]:
        """While the calling thread is at something that other ranks may wait for.

        Raises PipelineError if a rank has failed already. An exception inside fails all ranks.
        """
        self.check()
        with self.at(look):
            try:
                yield
            except (PipelineError, CollectiveError):
                raise
            except BaseException as error:
                self.failed(error, look().text)
                raise

    def building(self, what: str) -> contextlib.AbstractContextManager[None]:
        """While this rank prepares something, which may take longer than the timeout."""
        return self.busy(lambda: Activity(BUILDING + what))


def _outside() -> Activity:
    return Activity(OUTSIDE)


class Reaching:
    """See `Busy.reaching`: every message passes here, and a class takes a third of the time of a
    generator."""

    def __init__(self, busy: Busy, rank: int | None):
        self.busy, self.rank = busy, rank

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, PipelineError):
            raise self.busy.lost(self.rank, error) from error


class Waiting(Reaching):
    """See `Busy.waiting`; it tells what the rank is at meanwhile."""

    def __init__(self, busy: Busy, rank: int):
        super().__init__(busy, None if rank == ALL else rank)
        self.awaited, self.since = rank, time.monotonic()
        # What is outside goes on being asked: its text may tell more by then.
        self.outer = busy.looks[-1]

    def __call__(self) -> Activity:
        """Asked by other threads."""
        return attrs.evolve(self.outer(), waits_for=self.awaited, since=self.since)

    def __enter__(self) -> None:
        self.busy.looks.append(self)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self.busy.looks.remove(self)
            self.busy.waited += time.monotonic() - self.since


class Peers(Busy, AllRanks):
    """This process among those of the default process group: they agree, wait for one another and
    stop together.

    Building one is collective. When any rank fails, all leave what they wait for with the same
    `PipelineError` within some seconds; a rank that does not come out of its own computing is
    ended. `timeout` is how many seconds without progress count as a failure; `before` are those of
    the same process group that have failed. Raises PipelineError when a rank does not arrive.
    """

    def __init__(self, device: torch.device, timeout: float, before: "Peers | None" = None):
        script = Script(lambda: queued_by_now(device) if device.type == "cuda" else None)
        super().__init__(script.doing)
        self.script = script
        self.device, self.timeout = device, timeout
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.default = dist.group.WORLD
        # The connections stay: a new one may take seconds, since torch.distributed asks for the
        # name of the other end. Three, since each answers one question at a time.
        self.store: Any = before.store if before else self._store()
        self.beside: Any = before.beside if before else self.store.clone()
        self.inbox: Any = before.inbox if before else self.store.clone()
        first = before.generation + 1 if before else 0
        self.generation: int = rendezvous(self.store, self.rank, self.size, timeout, first)
        self.letters = dist.PrefixStore(f"world {self.generation}", self.inbox)
        self.failure: Failure | None = None
        self.raised = False  # whether the failure has become an exception here
        self.warned = False  # that ranks are seeded differently
        self.diagnosing = threading.Lock()  # while a thread finds out why something does not come
        self.nccl = goes_by_nccl(device)
        self.gloo: Any = _torch.gloo_device()
        self.connections: dict[tuple[tuple[int, ...], str], Connection] = {}
        self.ending: list[threading.Thread] = []  # in which NCCL ends connections
        self.ends, self.reducer = Ends(self), Reducer(device)
        monitor_store = dist.PrefixStore(f"world {self.generation}", self.beside)
        self.lifelines: Lifelines = before.lifelines if before else Lifelines(self.beside)
        self.monitor = Monitor(monitor_store, self.rank, self.size, self.look, self._hear)
        self.torn: dict[int, RuntimeError] = {}  # ranks that the service has lost, and how
        self.watch = WaitWatchdog(
            self.monitor, lambda: self.timeout, self.look, self.stop, self._seen_to_go
        )
        try:
            with self.building("the connections"):
                self.connection = self.connection_of(range(self.size))
        except BaseException:
            self._end_threads()
            raise

    def _store(self) -> Any:
        group: Any = self.default
        return dist.PrefixStore("pfeife", group.get_group_store())

    @property
    def streams(self) -> int:
        """Under NCCL, of this rank: that which computes, that which reduces, and one for each
        connection."""
        connections = [
            connection
            for connection in self.connections.values()
            if connection.mine and connection.nccl
        ]
        return 2 + len(connections)

    @property
    def patience(self) -> tuple[timedelta, ...]:
        """What a wait for a message is given: on CUDA a time would block the host, and NCCL's
        watchdog looks after it."""
        return () if self.nccl else (FOREVER,)

    def connection_of(
        self, ranks: Sequence[int], purpose: str = ALL_RANKS, device: torch.device | None = None
    ) -> Connection:
        """The connection of some ranks, for tensors on the world's or another device; all ranks of
        the world make new ones, in one order, and connect there."""
        key = (tuple(ranks), purpose)
        if key not in self.connections:
            prefixed = dist.PrefixStore(f"world {self.generation}", self.store)
            gloo = None if self.nccl and device is None else self.gloo
            with self.reaching(None):
                made = Connection(
                    ranks, device or self.device, self.timeout, prefixed, purpose, gloo
                )
            self.connections[key] = made
            if made.nccl and made.mine:
                with self.waiting(ALL):  # who does not come is found as in any wait
                    use_once(made, purpose)
                self.check()
        return self.connections[key]

    def check(self) -> None:
        """Raises PipelineError if any rank has failed."""
        if self.failure is not None:
            raise self._stopped(self.failure)

    def failed(self, error: BaseException, where: str) -> None:
        """Stops all ranks, since this one has raised an exception."""
        self._stopped(failure_of(error, self.rank, where))

    def _stopped(self, failure: Failure) -> PipelineError:
        failure = self.stop(failure)
        self.raised = True
        return PipelineError(failure)

    def stop(self, failure: Failure) -> Failure:
        """Stops all ranks; returns the first failure that was announced, which may be another."""
        if self.failure is None:
            self.failure = self.monitor.announce(failure)
        # A copy of the list: another thread may be making a connection.
        for connection in list(self.connections.values()):
            connection.cut(keep=True)
        return self.failure

    def _hear(self, failure: Failure) -> None:
        """On a thread: another rank has failed, so what this one waits for must end. A collective
        of the script's own does not."""
        self.stop(failure)
        outside = self.script.doing()
        if not self.inside and outside.waits_for is not None:
            log.error("rank %d waits in %s: %s", self.rank, outside.text, failure)
        left, before = GRACE, time.monotonic()
        while self.inside and left > 0:
            time.sleep(_TICK)
            now = time.monotonic()  # who computes keeps this thread waiting: ticks may be long
            spent, before = min(now - before, INTERVAL), now  # but a process may have been stopped
            # Who finds out what has happened is about to come out.
            left -= 0 if self.diagnosing.locked() else spent
        if self.inside:
            log.critical(
                "rank %d ends: %s; this rank was in %s and did not come out of it",
                self.rank,
                failure,
                self.looks[-1]().text,
            )
            end_process()

    def _seen_to_go(self, doing: Activity) -> Failure | None:
        """Why there is no use in waiting: a node is cut off, or, for what NCCL carries, which does
        not notice it, a process is gone: the sockets of the service do."""
        if self.failure is not None:
            return None
        node = self.lifelines.lost()
        if node is not None:
            silent = f"{node} is cut off: it has not answered for {SILENCE} s"
            return Failure(node.first, "", f"{silent}; rank {self.rank} waited in {doing.text}")
        if not self.nccl or not self.torn:
            return None
        peer, error = next(iter(self.torn.items()))
        with self.diagnosing:
            return diagnosis.cause(self.monitor, peer, error, doing.text)

    def lost(self, peer: int | None, error: RuntimeError) -> PipelineError:
        """The error to raise when a message from or to a rank of the world (None if it is not
        known which) has failed."""
        # One thread at a time: what the first one finds out is true for the others, too.
        with self.diagnosing:
            doing = self.looks[-1]().text
            return self._stopped(self.failure or diagnosis.cause(self.monitor, peer, error, doing))

    def wait(self, work: dist.Work, *, of_all: bool = False) -> None:
        """Waits for a collective operation of all ranks, or of some. The script rests meanwhile."""
        with self.waiting(ALL), self.script.resting(Rest.OPERATION, operation=of_all):
            if self.nccl and isinstance(work, dist.Work):
                wait_for_queued(work, self.check)
            else:
                self._wait_in_slices(work)

    def _wait_in_slices(self, work: dist.Work) -> None:
        while True:
            over = work.is_completed()  # then an error is its own, not that of the time
            try:
                work.wait(SLICE)
                return
            except RuntimeError:
                self.check()
                if over:
                    raise

    def _end_threads(self) -> None:
        self.monitor.ask(lambda: leave(self.monitor.store, self.rank, OVER))
        self.watch.end()
        self.monitor.end()
