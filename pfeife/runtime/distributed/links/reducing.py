"""Buckets of gradients, reduced beside what the rank computes, always in one order of additions.

    parts -> flat ---alltoall---> scratch --added in order--> sums ---to all---> flat
             (copied)             a piece of each member     (averaged)     or kept by their owner
    of what members have parts    sums ---alltoall---> scratch ---put together---> whole gradients

A sum is that of the members' parts in their order wherever it stands in a bucket, which a ring
does not keep to: so the bits depend neither on the sizes of buckets nor on what else is under way.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import cached_property
from typing import Any

import attrs
import torch

from pfeife import _torch
from pfeife.data.machine import Mesh
from pfeife.lowering.buckets import Bucket
from pfeife.runtime.distributed.links.connection import Connection, finished
from pfeife.runtime.local.threads import flushes_denormals


class Reducer:
    """Does a rank's jobs one after another: a thread where they would keep the caller, under Gloo;
    on CUDA a stream, on which they follow what the caller has queued before."""

    def __init__(self, device: torch.device):
        self.device = device
        self.thread = ThreadPoolExecutor(1, "pfeife reducer")  # started with the first job
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, job: Callable[[], object], touched: Iterable[torch.Tensor]) -> "_Job | _Queued":
        """Returns at once, with what can be waited for like torch.distributed's own work. What is
        `touched` goes back to the caller's stream when the job is over, waited for or not."""
        if self.stream is None:
            flushes = flushes_denormals()
            return _Job(self.thread.submit(_alone, job, flushes))
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            job()
            for tensor in touched:
                tensor.record_stream(self.stream)
            return _Queued(self.stream.record_event())

    def close(self) -> None:
        """Takes nothing more; the thread ends when what it has is done or has failed."""
        self.thread.shutdown(wait=False)


def _alone(job: Callable[[], object], flushes: bool) -> float:
    """Does a job; returns when that was done, as time.perf_counter tells it."""
    torch.set_flush_denormal(flushes)
    with torch.no_grad():
        job()
    return time.perf_counter()


class _Job:
    """One that the thread does."""

    def __init__(self, done: Future[float]):
        self.done = done

    @property
    def ended(self) -> float:
        """When it was done; waits for that."""
        return self.done.result()

    def is_completed(self) -> bool:
        """Whether it is done, or has failed."""
        return self.done.done()

    def wait(self, patience: timedelta) -> None:
        """Raises RuntimeError if it has failed or takes longer."""
        try:
            self.done.result(patience.total_seconds())
        except TimeoutError as error:
            raise RuntimeError("what runs beside the computing is still under way") from error


class _Queued:
    """One on a stream, which the caller's stream waits for. When it was done nobody knows: as
    with all that is queued, a measurement waits for it (`profile`)."""

    def __init__(self, event: torch.cuda.Event):
        self.event = event

    def is_completed(self) -> bool:
        """Whether the stream has come to it."""
        return self.event.query()

    def wait(self, patience: timedelta) -> None:
        """Keeps the caller's stream waiting, not the caller."""
        self.event.wait(torch.cuda.current_stream(self.event.device))

    @property
    def ended(self) -> float:
        """Now, for want of a better time."""
        return time.perf_counter()


@attrs.frozen(eq=False, slots=False)
class Route:
    """How a bucket travels for one member of a mesh, which is in a replica; pieces stand in the
    order of the connection's ranks. `group` is that of the members of its rank."""

    bucket: Bucket
    mesh: Mesh
    replica: int
    connection: Connection
    group: Connection | None

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """Replica and member of the connection's ranks."""
        ranks = self.connection.ranks
        return [(self.mesh.place(rank)[0], self.mesh.of_member(rank).member) for rank in ranks]

    @property
    def piece(self) -> int:
        """How many elements this member adds up."""
        return self.bucket.piece(self.replica, self.mesh.member)

    @cached_property
    def _order(self) -> list[list[list[int]]]:
        """The places of pieces in which they are added: those of a pipeline, these sums over
        members, and these over replicas."""
        first, index = self.bucket.first, self.connection.index
        replicas = range(self.mesh.replicas) if first.replicas > 1 else (self.replica,)
        members = self.mesh.each_member if first.members > 1 else (self.mesh,)
        return [
            [[index(mesh.in_world(r, rank)) for rank in first.ranks] for mesh in members]
            for r in replicas
        ]

    def packed(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parts as they are sent, in one tensor."""
        bucket = self.bucket
        flat = parts[0].new_empty(bucket.flat_bytes // bucket.dtype.itemsize, dtype=bucket.dtype)
        places: list[Sequence[int]] = [range(len(parts))]
        if bucket.owned:
            places = [bucket.share(*place) for place in self._places]
        at = 0
        for place in (place for share in places for place in share):
            _view(flat, at, bucket, place).copy_(parts[place])
            at += bucket.elements[place]
        flat[at:].zero_()
        return flat

    def sums(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Those that the member gets, as parts of one tensor, each with a count of its changes."""
        totals, at = {}, 0
        # Each is a tensor of its own to autograd: what is written to one does not count for others.
        for place in self.bucket.share(self.replica, self.mesh.member):
            name = self.bucket.reductions[place].name
            totals[name] = _view(flat, at, self.bucket, place).data  # a view has its base's count
            at += self.bucket.elements[place]
        return totals

    def run(
        self, flat: torch.Tensor, scratch: torch.Tensor, owned_sum: torch.Tensor | None
    ) -> None:
        """Sends, adds up, and gathers the sums in `flat`, or keeps its own in `owned_sum`."""
        bucket, group = self.bucket, self.connection.group
        size = self.piece * bucket.dtype.itemsize
        piece_sizes = [bucket.piece(*place) * bucket.dtype.itemsize for place in self._places]
        scratch = scratch[: size * bucket.members]
        sent = flat.view(torch.uint8)
        finished(
            self.connection,
            group.alltoall_base(scratch, sent, [size] * bucket.members, piece_sizes),
            flat,
        )
        total = self._added(scratch.view(bucket.dtype).view(bucket.members, -1))
        if owned_sum is None:
            finished(
                self.connection, _torch.gather_into(group, sent, total.view(torch.uint8)), flat
            )
        else:
            owned_sum.copy_(total)

    def room(self, like: torch.Tensor) -> dict[str, torch.Tensor]:
        """Memory for the gradients that this member puts together."""
        kept = self.bucket.kept(self.replica, self.mesh.member)
        reductions = self.bucket.reductions
        return {
            reductions[place].name: like.new_empty(split.whole(self.bucket.shapes[place]))
            for place in kept
            if (split := reductions[place].split) is not None
        }

    def join(
        self, sums: torch.Tensor, scratch: torch.Tensor, whole: Mapping[str, torch.Tensor]
    ) -> None:
        """Sends keepers the parts, and puts together those that it keeps.

        sums      what it has of what member 0 keeps, of what member 1 keeps, ...
        scratch   [members, what it keeps]      row j is of member j
        """
        assert self.group is not None
        bucket, members = self.bucket, range(len(self.group.ranks))
        sizes = [bucket.kept_bytes(self.replica, member) for member in members]
        own = sizes[self.mesh.member]
        sent, scratch = sums.view(torch.uint8)[: sum(sizes)], scratch[: own * len(sizes)]
        finished(
            self.group,
            self.group.group.alltoall_base(scratch, sent, [own] * len(sizes), sizes),
            sums,
        )
        rows, at = scratch.view(bucket.dtype).view(len(sizes), -1), 0
        for place in bucket.kept(self.replica, self.mesh.member):
            reduction, elements = bucket.reductions[place], bucket.elements[place]
            assert reduction.split is not None
            parts = rows[:, at : at + elements].unflatten(1, bucket.shapes[place])
            reduction.split.gather(parts, whole[reduction.name])
            at += elements

    def run_sparse(self, totals: Sequence[torch.Tensor]) -> None:
        """Sums in place. Gloo sends the rows that gradients have; other backends refuse them."""
        for total in totals:
            finished(self.connection, self.connection.group.allreduce(total), total)
            if self.bucket.first.average:
                total.div_(self.bucket.first.replicas)

    def _added(self, pieces: torch.Tensor) -> torch.Tensor:
        replicas = [
            _in_order([_in_order([pieces[place] for place in ranks]) for ranks in members])
            for members in self._order
        ]
        total = _in_order(replicas)
        return total.div_(len(replicas)) if self.bucket.first.average else total


def _in_order(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their sum, in the first one's place."""
    total = pieces[0]
    for piece in pieces[1:]:
        total.add_(piece)
    return total


def _view(flat: torch.Tensor, at: int, bucket: Bucket, place: int) -> torch.Tensor:
    """A gradient's part of one tensor."""
    return flat[at : at + bucket.elements[place]].view(bucket.shapes[place])


@attrs.frozen(eq=False)
class Beside:
    """What is on its way beside what a rank computes: once what was `begun` is over, `result` says
    what this rank has of it. `holding` is what must live as long."""

    begun: _Job | _Queued
    waiting: Callable[[Any], None]
    result: Callable[[], Mapping[str, torch.Tensor]]
    holding: Sequence[torch.Tensor] = ()

    @property
    def ended(self) -> float:
        """When what was begun was done, as time.perf_counter tells it."""
        return self.begun.ended

    def wait(self) -> Mapping[str, torch.Tensor]:
        """What this rank has of it, once that is there."""
        self.waiting(self.begun)
        return self.result()
