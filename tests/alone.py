"""One rank of a world whose others are not there, by NCCL's rules of streams (see `happens`).

A process group has a stream, on which it reads what is sent and writes what is received, after all
that the current stream had by then. Nobody is at the other end: the tensors have no contents.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from happens import Event, Recorder

from pfeife.runtime.distributed.control.script_point import Script
from pfeife.runtime.distributed.links.channels import Ends
from pfeife.runtime.distributed.links.reducing import Reducer
from pfeife.runtime.distributed.liveness.heartbeat import OUTSIDE, Activity
from pfeife.runtime.distributed.world.world import World


class Queued(dist.Work):
    """What a group has put on its stream. What it touches lives until somebody waits for it, as
    torch keeps it, only where the group does so."""

    def __init__(self, group: "Group", event: Event):
        super().__init__()
        self.group, self.event = group, event

    def is_completed(self) -> bool:
        self.event.synchronize()
        return True

    def wait(self) -> bool:  # type: ignore[override]  # with a time it would keep the host
        self.group.kept.pop(self, None)
        self.event.wait()
        return True


class Group:
    def __init__(self, recorder: Recorder, device: torch.device, keeps: bool):
        self.recorder, self.device, self.keeps = recorder, device, keeps
        self.stream = recorder.another(device)
        self.kept: dict[Queued, list[torch.Tensor]] = {}

    def _queued(self, read: list[torch.Tensor], written: list[torch.Tensor]) -> Queued:
        self.stream.wait_stream(self.recorder.current(self.device))
        with self.recorder.on_stream(self.stream):
            for one in read:
                one.clone()
            for one in written:
                one.zero_()
        work = Queued(self, self.stream.record_event())
        if self.keeps:
            self.kept[work] = [*read, *written]
        return work

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Queued:
        return self._queued(tensors, [])

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Queued:
        return self._queued([], tensors)

    def alltoall_base(
        self, found: torch.Tensor, mine: torch.Tensor, into: list[int], out: list[int]
    ) -> Queued:
        return self._queued([mine], [found])

    def _allgather_base(self, found: torch.Tensor, mine: torch.Tensor) -> Queued:
        return self._queued([mine], [found])


class AloneConnection:
    nccl = True

    def __init__(self, ranks: Sequence[int], rank: int):
        self.ranks, self.mine = tuple(ranks), rank in ranks
        self.place = self.index(rank) if self.mine else None

    def index(self, rank: int) -> int:
        return self.ranks.index(rank)


class AloneWorld(World):
    """A rank's world; `keeps` says whether its groups keep what nobody waits for."""

    def __init__(self, recorder: Recorder, rank: int, size: int, keeps: bool = False):
        self.recorder, self.keeps = recorder, keeps
        self.device, self.rank, self.size = torch.device("cuda", 0), rank, size
        self.failure, self.raised, self.nccl, self.waited = None, False, True, 0.0
        self.looks = [lambda: Activity(OUTSIDE)]
        self.connections: dict[Any, Any] = {}
        self.script = Script()
        self.reducer, self.ends = Reducer(self.device), Ends(self)

    def connection_of(self, ranks: Sequence[int], purpose: str = "", device: Any = None) -> Any:
        found = self.connections.setdefault(
            (tuple(ranks), purpose), AloneConnection(ranks, self.rank)
        )
        if found.mine and not hasattr(found, "group"):
            found.group = Group(self.recorder, self.device, self.keeps)
        return found
