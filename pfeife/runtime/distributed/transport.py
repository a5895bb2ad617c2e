"""Sends, receives and reductions by torch.distributed (Gloo, NCCL)."""

import copy
import time
from collections import Counter, deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from pfeife.data.machine import Mesh
from pfeife.ir.program import Program, Reduction, messages
from pfeife.lowering.envelope import APART, Channel, Envelope, Tensors
from pfeife.runtime.distributed.buffers import Buffers
from pfeife.runtime.distributed.line import Line
from pfeife.runtime.distributed.sending import Sending
from pfeife.runtime.distributed.world import World
from pfeife.runtime.step import Inbox

End = tuple[Line, int]  # and the other rank as its group counts
Works = Sequence[dist.Work | Sending]


class DistributedTransport:
    """One rank of one pipeline of a mesh.

    Building one is collective: every rank of the world must do it with the same program. Every
    direction between two ranks has a process group of its own. Under NCCL opposite ones overlap
    only so. Under Gloo, who sends locks the connection; what then arrives on it keeps Gloo's
    thread asking the system again and again, to the sender's cost if both share a core.
    """

    def __init__(self, world: World, mesh: Mesh, program: Program):
        if mesh.size != world.size:
            raise ValueError(
                f"the mesh has {mesh.replicas} replicas of {mesh.ranks} ranks, the world has "
                f"{world.size} processes; start {mesh.size} (torchrun --nproc-per-node {mesh.size})"
            )
        self.world, self.mesh = world, mesh
        self.device: torch.device | None = world.device
        self.replica, self.rank = divmod(world.rank, mesh.ranks)
        self.offset = self.replica * mesh.ranks
        self.patience = world.patience
        self.groups = self._groups(program.reductions)
        self.out: dict[int, End] = {}
        self.into: dict[int, End] = {}
        self._connect(program)
        self.waiting: dict[int, deque[tuple[Tensors, list[dist.Work]]]] = {}
        self.inboxes: dict[int, Inbox] = {}
        self.buffers = Buffers(self.device)
        self.leaving: dict[int, deque[tuple[Works, list[torch.Tensor]]]] = {}
        self.apart = set[int]()  # ranks to which the world's sender sends
        self.finished: Counter[int] = Counter()
        # The rank that this one waits for, and since when.
        self.awaited: tuple[int, float] | tuple[None, None] = None, None

    def for_step(self) -> "DistributedTransport":
        """The same transport with messages of its own: steps may overlap, and each knows when
        its own messages have arrived."""
        self.buffers.forget_used()
        other = copy.copy(self)
        other.waiting, other.inboxes = {}, {}
        other.leaving, other.finished = {}, Counter()
        return other

    def _groups(self, reductions: Sequence[Reduction]) -> dict[tuple[int, ...], Line]:
        """A process group for every set of ranks that reduces together, made in one order."""
        wanted: dict[tuple[int, ...], None] = {}
        for reduction in reductions:
            for replica in range(self.mesh.replicas):
                wanted[self._members(reduction, replica)] = None
        several = [members for members in wanted if len(members) > 1]
        return {members: self.world.line_of(members, "reduce") for members in several}

    def _members(self, reduction: Reduction, replica: int) -> tuple[int, ...]:
        replicas = range(self.mesh.replicas) if reduction.replicas > 1 else (replica,)
        return tuple(r * self.mesh.ranks + rank for r in replicas for rank in reduction.ranks)

    def _connect(self, program: Program) -> None:
        used = sorted({(m.source, m.destination) for m in messages(program)})
        for replica in range(self.mesh.replicas):
            offset = replica * self.mesh.ranks
            for source, destination in used:
                pair = (offset + source, offset + destination)
                line = self.world.line_of(sorted(pair), "down" if source < destination else "up")
                if pair[0] == self.world.rank:
                    self.out[destination] = (line, line.index(pair[1]))
                elif pair[1] == self.world.rank:
                    self.into[source] = (line, line.index(pair[0]))
                if self.world.rank in pair and self.world.device.type == "cuda":
                    self._first_message(line, pair)

    def _first_message(self, line: Line, pair: tuple[int, int]) -> None:
        """NCCL connects with it, which both ends must wait for."""
        data = [torch.zeros(1, dtype=torch.uint8, device=self.device)]
        if pair[0] == self.world.rank:
            line.group.send(data, line.index(pair[1]), 0).wait()
        else:
            line.group.recv(data, line.index(pair[0]), 0).wait()

    def expect(self, source: int, channel: Channel) -> None:
        self.inboxes[source] = Inbox(channel)
        self.waiting.setdefault(source, deque())
        self._post(source)

    def _post(self, source: int) -> None:
        waiting, (line, peer) = self.waiting[source], self.into[source]
        for envelope in self.inboxes[source].due():
            values, buffers = envelope.empty(self.device, self.buffers.take)
            try:
                works = [line.group.recv([one], peer, 0) for one in buffers]
            except RuntimeError as error:
                raise self.world.lost(self.offset + source, error) from error
            waiting.append((values, works))

    def send(self, destination: int, values: Tensors, envelope: Envelope) -> None:
        pieces = envelope.pack(values)
        works = self._sent(destination, pieces, envelope.bytes)
        leaving = self.leaving.get(destination)
        if leaving is None:
            leaving = self.leaving[destination] = deque()
        leaving.append((works, pieces))

    def _sent(self, destination: int, pieces: list[torch.Tensor], size: int) -> Works:
        line, peer = self.out[destination]
        if size >= APART and line.device.type == "cpu":
            self.apart.add(destination)  # from now on: messages must not overtake one another
        try:
            if destination in self.apart:
                return self.world.sender.send(line, pieces, peer)
            return [line.group.send([piece], peer, 0) for piece in pieces]
        except RuntimeError as error:
            raise self.world.lost(self.offset + destination, error) from error

    def release(self, destination: int, count: int) -> None:
        # Gloo's sends say that they are completed only when they have been waited for, so it
        # matters to know without asking when that takes no time.
        known = min(count, self.finished[destination])
        self.finished[destination] -= known
        for _ in range(count - known):
            self._wait(destination, self.leaving[destination].popleft()[0])

    def _wait(self, peer: int, works: Works) -> None:
        self.awaited = self.offset + peer, time.monotonic()
        try:
            for work in works:
                work.wait(*self.patience)
            self.awaited = None, None
        except RuntimeError as error:
            raise self.world.lost(self.offset + peer, error) from error

    def receive(self, source: int) -> Tensors:
        values, works = self.waiting[source].popleft()
        self._wait(source, works)
        self.inboxes[source].taken += 1
        self._post(source)
        return values

    def reduce(self, reduction: Reduction, part: torch.Tensor) -> torch.Tensor:
        """Sums by all-reduce (its order of additions is the backend's), then averages."""
        line = self.groups.get(self._members(reduction, self.replica))
        total = part.clone(memory_format=torch.contiguous_format)
        if line is not None:
            self.world.wait(line.group.allreduce(total))
        return total / reduction.replicas if reduction.average else total

    def finish(self) -> None:
        """Waits until all that this step has sent has arrived."""
        for destination, leaving in self.leaving.items():
            while leaving:
                self._wait(destination, leaving.popleft()[0])
                self.finished[destination] += 1
