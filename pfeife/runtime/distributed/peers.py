"""The processes that work together: they agree, wait for one another and stop together."""

import contextlib
import hashlib
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist

from pfeife import _torch
from pfeife._torch import is_absent
from pfeife.data import plain
from pfeife.runtime.distributed.agreement import Agreed, comparable, disagreement
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
from pfeife.runtime.distributed.served.posting import OVER, leave
from pfeife.runtime.distributed.served.script_point import Rest, Script
from pfeife.runtime.failure import CollectiveError, Failure, PipelineError, failure_of

log = logging.getLogger("pfeife")

GRACE = 7.0  # seconds that a rank has to come out of its step when another one has failed
_SHORT = 128  # bytes of a note from which on it has a message of its own
# What a rank adds to an agreement: the digest of its text (zeros: it cannot go on), a number, the
# bytes of its note (_SHORT: it goes apart), the note, the digest of its own text.
_ADDED = struct.Struct(f"<32sqB{_SHORT}s16s")
_TICK = 0.05  # seconds
SLICE = timedelta(seconds=INTERVAL)


class Peers:
    """This process among those of the default process group: they agree, wait for one another and
    stop together.

    Building one is collective. When any rank fails, all leave what they wait for with the same
    `PipelineError` within some seconds; a rank that does not come out of its own computing is
    ended. `timeout` is how many seconds without progress count as a failure; `before` are those of
    the same process group that have failed. Raises PipelineError when a rank does not arrive.
    """

    def __init__(self, device: torch.device, timeout: float, before: "Peers | None" = None):
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
        self.inside, self.asking = 0, False
        self.waiting: float | None = None  # since when for all ranks
        self.waited = 0.0  # seconds so far, for messages and for all ranks
        self.look: Callable[[], Activity] = _outside
        self.nccl = goes_by_nccl(device)
        self.script = Script(lambda: queued_by_now(device) if device.type == "cuda" else None)
        self.gloo: Any = _torch.gloo_device()
        self.connections: dict[tuple[tuple[int, ...], str], Connection] = {}
        self.ending: list[threading.Thread] = []  # in which NCCL ends connections
        self.ends, self.reducer = Ends(self), Reducer(device)
        monitor_store = dist.PrefixStore(f"world {self.generation}", self.beside)
        self.lifelines: Lifelines = before.lifelines if before else Lifelines(self.beside)
        self.monitor = Monitor(monitor_store, self.rank, self.size, self._look, self._hear)
        self.torn: dict[int, RuntimeError] = {}  # ranks that the service has lost, and how
        self.watch = WaitWatchdog(
            self.monitor, lambda: self.timeout, self._look, self.stop, self._seen_to_go
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
            try:
                made = Connection(
                    ranks, device or self.device, self.timeout, prefixed, purpose, gloo
                )
                self.connections[key] = made
            except RuntimeError as error:
                raise self.lost(None, error) from error
            if made.nccl and made.mine:
                self._connect(made, purpose)
        return self.connections[key]

    def _connect(self, connection: Connection, purpose: str) -> None:
        """Who does not come is found as in any wait."""
        self.waiting = time.monotonic()
        try:
            use_once(connection, purpose)
        except RuntimeError as error:
            raise self.lost(None, error) from error
        finally:
            self.waiting = None
        self.check()

    def _look(self) -> Activity:
        doing, since = self.look(), self.waiting
        if since is not None:
            return attrs.evolve(doing, waits_for=ALL, since=since)
        return self.script.doing() if doing.text == OUTSIDE else doing

    @contextlib.contextmanager
    def busy(self, look: Callable[[], Activity]) -> Iterator[None]:
        """While the calling thread is at something that other ranks may wait for.

        Raises PipelineError if a rank has failed already. An exception inside fails all ranks.
        """
        self.check()
        before, self.look = self.look, look
        self.inside += 1
        try:
            yield
        except (PipelineError, CollectiveError):
            raise
        except BaseException as error:
            self.stop(failure_of(error, self.rank, look().text))
            self.raised = True
            raise
        finally:
            self.inside -= 1
            self.look = before

    def building(self, what: str) -> contextlib.AbstractContextManager[None]:
        """While this rank prepares something, which may take longer than the timeout."""
        return self.busy(lambda: Activity(BUILDING + what))

    def check(self) -> None:
        """Raises PipelineError if any rank has failed."""
        if self.failure is not None:
            raise self._stopped(self.failure)

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
            connection.cut()
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
            left -= 0 if self.asking else spent  # who asks what has happened is about to come out
        if self.inside:
            log.critical(
                "rank %d ends: %s; this rank was in %s and did not come out of it",
                self.rank,
                failure,
                self.look().text,
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
        with self._diagnosis():
            return diagnosis.cause(self.monitor, peer, error, doing.text)

    def lost(self, peer: int | None, error: RuntimeError) -> PipelineError:
        """The error to raise when a message from or to a rank of the world (None if it is not
        known which) has failed."""
        with self._diagnosis():
            doing = self.look().text
            return self._stopped(self.failure or diagnosis.cause(self.monitor, peer, error, doing))

    @contextlib.contextmanager
    def _diagnosis(self) -> Iterator[None]:
        """While the calling thread finds out why something does not come: that takes seconds, but
        ends by itself."""
        self.asking = True
        try:
            yield
        finally:
            self.asking = False

    def wait(self, work: dist.Work, *, of_all: bool = False) -> None:
        """Waits for a collective operation of all ranks, or of some. The script rests meanwhile."""
        self.waiting = time.monotonic()
        try:
            with self.script.resting(Rest.OPERATION, operation=of_all):
                if self.nccl and isinstance(work, dist.Work):
                    wait_for_queued(work, self.check)
                else:
                    self._wait_in_slices(work)
        except PipelineError:
            raise
        except RuntimeError as error:
            raise self.lost(None, error) from None
        finally:
            self.waited += time.monotonic() - self.waiting
            self.waiting = None

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

    def broadcast(self, value: torch.Tensor, source: int, among: Connection | None = None) -> None:
        """Rank `source`'s contents of a dense tensor of bytes, in place on every rank, or on those
        of a connection."""
        through = among or self.connection
        work = through.group.broadcast(value, through.index(source))
        self.wait(work, of_all=among is None)

    def gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor of the same shape and dtype, on every rank."""
        gathered = [torch.empty_like(value) for _ in range(self.size)]
        self.wait(self.connection.group.allgather([gathered], [value]), of_all=True)
        return gathered

    def from_rank_zero(self, text: str) -> str:
        """Rank 0's text, on every rank (collective)."""
        data = self._bytes(text)
        size = torch.tensor([data.numel()], device=self.device)
        self.broadcast(size, 0)
        _check_length(int(size), 0)
        shared = (
            data
            if self.rank == 0
            else torch.empty(int(size), dtype=torch.uint8, device=self.device)
        )
        self.broadcast(shared, 0)
        return bytes(shared.tolist()).decode()

    def decided_by_rank_zero(self, decide: Callable[[], str]) -> str:
        """What rank 0 decides, on every rank (collective). If that raises a ValueError there, all
        ranks raise a CollectiveError with its text."""
        text = ""
        if self.rank == 0:
            try:
                text = "+" + decide()
            except ValueError as error:
                text = "-" + str(error)
        shared = self.from_rank_zero(text)
        if shared.startswith("-"):
            raise CollectiveError(shared[1:])
        return shared[1:]

    def from_all_ranks(self, text: str) -> list[str]:
        """Every rank's text, on every rank (collective)."""
        data = self._bytes(text)
        sizes = [int(size) for size in self.gather(torch.tensor([len(data)], device=self.device))]
        for rank, size in enumerate(sizes):
            _check_length(size * self.size, rank)
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: len(data)] = data
        parts = zip(self.gather(padded), sizes, strict=True)
        return [bytes(part[:size].tolist()).decode() for part, size in parts]

    def _bytes(self, text: str) -> torch.Tensor:
        data = bytearray(_encoded(text))
        encoded = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
        return encoded.to(self.device, torch.uint8)

    def check_agreement(self, text: str, what: str) -> None:
        """Raises CollectiveError on every rank unless all ranks give the same text (collective);
        the error has the first line that differs."""
        self.agreed(text, what)

    def agreed(
        self,
        text: str,
        what: str,
        *,
        number: int = 0,
        note: str = "",
        refused: Exception | None = None,
        own: str = "",
        groups: Sequence[Sequence[int]] = (),
    ) -> Agreed:
        """What every rank adds to a text that all of them give alike (collective), and to one of
        their `own` that the ranks of each group do.

        Raises CollectiveError on every rank if the ranks are at different places of the script, by
        `what` they agree on; if the texts differ, with the first line that does; or if any rank
        cannot go on: with its own words there, and on the others with the rank in front."""
        # One gather of a fixed size while all goes well; the texts follow only if they differ.
        text = f"{what}\0{text}"
        compared = (_encoded(comparable(part)) for part in (text, own))
        digest, own_digest = (hashlib.sha256(encoded).digest() for encoded in compared)
        noted = _encoded(note)
        short = noted if len(noted) < _SHORT else b""
        size = min(len(noted), _SHORT)
        data = _ADDED.pack(b"" if refused else digest, number, size, short, own_digest[:16])
        packed = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        every = (_ADDED.unpack(bytes(row.tolist())) for row in self.gather(packed))
        digests, numbers, sizes, shorts, owned = zip(*every, strict=True)
        # Digests of zeros are equal where no rank can go on.
        alike = len(set(digests)) == 1 and any(digests[0])
        if not (alike and all(len({owned[rank] for rank in group}) == 1 for group in groups)):
            cause = f"{type(refused).__name__}: {refused}" if refused else ""
            reports = self.from_all_ranks(f"{cause}\0{text}\0{own}")
            raise CollectiveError(
                str(refused) if refused else disagreement(reports, groups)
            ) from refused
        if max(sizes) == _SHORT:
            return Agreed(numbers, tuple(self.from_all_ranks(note)))
        notes = (encoded[:size].decode() for encoded, size in zip(shorts, sizes, strict=True))
        return Agreed(numbers, tuple(notes))

    def differing(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of the tensors that are not the same on all ranks, by checksums (collective)."""
        if not tensors:
            return []
        sums = self.checksums(tensors.values())
        wrong = torch.stack([rank_sums != sums[0] for rank_sums in sums]).any(0).tolist()
        return [name for name, differs in zip(tensors, wrong, strict=True) if differs]

    def checksums(self, tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
        """Those of some tensors, one at least, on every rank; -1 for None and for what is absent
        (collective)."""
        sums = [
            -1 if tensor is None or is_absent(tensor) else checksum(tensor) for tensor in tensors
        ]
        return self.gather(torch.tensor(sums, device=self.device))

    def _end_threads(self) -> None:
        self.monitor.ask(lambda: leave(self.monitor.store, self.rank, OVER))
        self.watch.end()
        self.monitor.end()
        self.script.seen = None


def _outside() -> Activity:
    return Activity(OUTSIDE)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _check_length(size: int, rank: int) -> None:
    if not 0 <= size <= plain.LARGEST_FILE:
        raise ValueError(f"rank {rank} wants to send {size} bytes of text to all; that is too much")


def checksum(tensor: torch.Tensor) -> int:
    """A number of 63 bits that depends on every byte of a tensor and on its place. Raises
    ValueError for one whose values are not here."""
    if is_absent(tensor):
        raise _torch.record_of(tensor).refusal("the comparison of what ranks are given")
    data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1
