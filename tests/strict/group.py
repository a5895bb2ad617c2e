"""A process group that behaves as torch's ProcessGroupNCCL does, over the model's streams.

An operation follows all that the current stream had when it was posted. A communicator connects
with its first operation, and again with the first one of every other kind (NCCL_RUNTIME_CONNECT, on
since 2.22): the host waits there for all members. Messages of two ranks have one communicator and
one stream, whichever way they go; collectives have another.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from strict.gpu import Communicator, Half, Meets, Mismatch, Operation
from strict.host import Host


class Queued(dist.Work):
    """What can be waited for by the current stream."""

    def __init__(self, host: Host, operation: Operation):
        super().__init__()
        self.host, self.operation = host, operation

    def is_completed(self) -> bool:
        """Whoever asks does so until it is true."""
        self.host.synchronize(self.operation, "waits until it is done")
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        assert timeout == timedelta(0), "NCCL's wait with a time keeps the host"
        self.host.waits_with(self.operation)
        return True


class Communicators:
    """What the ranks of one group share: the communicators that they have made."""

    def __init__(self, name: str, ranks: Sequence[int]):
        self.name, self.ranks = name, tuple(ranks)
        self.hosts: dict[int, Host] = {}
        self.made: dict[tuple[tuple[int, ...], bool], Communicator] = {}

    def of(self, ranks: tuple[int, ...], messages: bool) -> Communicator:
        if (ranks, messages) not in self.made:
            name = f"{self.name} {ranks}" + (" for messages" if messages else "")
            self.made[ranks, messages] = Communicator(name, ranks)
        return self.made[ranks, messages]


class Group:
    """One rank's end of a group."""

    def __init__(self, shared: Communicators, host: Host):
        self.shared, self.host = shared, host
        shared.hosts[host.rank] = host

    def _joined(self, ranks: tuple[int, ...], kind: str, messages: bool = False) -> Communicator:
        """The communicator of some ranks, connected for operations of a kind."""
        found, host = self.shared.of(ranks, messages), self.host
        joined = found.joined.setdefault(kind, set())
        if host.rank not in joined:
            found.streams[host.rank] = found.streams.get(host.rank) or host.gpu.stream(found.name)
            joined.add(host.rank)
            hosts = self.shared.hosts
            host.block(
                f"connects {found.name} for {kind}",
                lambda: joined == {*ranks},
                lambda: [hosts[one] for one in ranks if one not in joined],
            )
        return found

    def _post(self, what: str, meets: Meets) -> Queued:
        current = self.host.gpu.current
        own = meets.communicator.streams[self.host.rank]
        own.post(f"all before {what}", current.post("an event"))
        posted = own.post(what, meets=meets)
        if self.host.machine.blocks:
            self.host.synchronize(posted, "waits for the kernel that it has launched")
        return Queued(self.host, posted)

    def _half(self, sends: bool, tensors: Sequence[torch.Tensor], peer: int) -> Queued:
        other = self.shared.ranks[peer]
        pair = tuple(sorted((self.host.rank, other)))
        (tensor,) = tensors
        what = f"a {'send to' if sends else 'receive from'} rank {other} of {tensor.nbytes} bytes"
        comm = self._joined(pair, "messages", True)
        return self._post(what, Meets(comm, [Half(sends, other, tensor)]))

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Queued:
        return self._half(True, tensors, peer)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Queued:
        return self._half(False, tensors, peer)

    def grouped(self, halves: Sequence[Half]) -> Queued:
        """As batch_isend_irecv: over the communicator of all members, done when all are."""
        comm = self._joined(self.shared.ranks, "groups of messages")
        return self._post("a group of messages", Meets(comm, list(halves)))

    def _collective(self, what: str, given: Any, act: Callable[[dict[int, Any]], None]) -> Queued:
        comm = self._joined(self.shared.ranks, " ".join(what.split()[:2]))
        return self._post(what, Meets(comm, [], what, given, act))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Queued:
        source = self.shared.ranks[root]

        def act(given: dict[int, torch.Tensor]) -> None:
            for one in given.values():
                one.copy_(given[source])

        return self._collective(f"a broadcast of {tensor.nbytes} bytes from {source}", tensor, act)

    def allgather(self, found: list[list[torch.Tensor]], mine: list[torch.Tensor]) -> Queued:
        what = f"an all-gather of {mine[0].nbytes} bytes"
        return self._collective(what, (found[0], mine[0]), _gather)

    def _allgather_base(self, found: torch.Tensor, mine: torch.Tensor) -> Queued:
        parts = list(found.view(len(self.shared.ranks), -1))
        return self._collective(f"an all-gather of {mine.nbytes} bytes", (parts, mine), _gather)

    def alltoall_base(
        self, found: torch.Tensor, mine: torch.Tensor, into: list[int], out: list[int]
    ) -> Queued:
        return self._collective("an all-to-all", (found.split(into), mine.split(out)), _exchange)


def _gather(given: dict[int, Any]) -> None:
    for found, _ in given.values():
        for part, (_, mine) in zip(found, given.values(), strict=True):
            part.copy_(mine.view_as(part))


def _exchange(given: dict[int, Any]) -> None:
    for at, (rank, (found, _)) in enumerate(given.items()):
        for part, (source, (_, sent)) in zip(found, given.items(), strict=True):
            if part.nbytes != sent[at].nbytes:
                sizes = f"{sent[at].nbytes} bytes for {part.nbytes}"
                raise Mismatch(f"in an all-to-all rank {source} sends rank {rank} {sizes}")
            part.copy_(sent[at])
