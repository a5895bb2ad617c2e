"""Sends, receives and reductions by torch.distributed (Gloo, NCCL)."""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pfeife.data.machine import Mesh
from pfeife.ir.evaluate import State
from pfeife.ir.messages import messages
from pfeife.ir.parts import Port, Reduction
from pfeife.ir.program import Program
from pfeife.lowering.buckets import Bucket, buckets_of
from pfeife.lowering.envelope import Envelope, Tensors
from pfeife.lowering.telling import kept_by_stage, tellings
from pfeife.runtime.buffered import Buffered
from pfeife.runtime.distributed.links.buffers import Buffers
from pfeife.runtime.distributed.links.channels import Incoming, Outgoing, Works
from pfeife.runtime.distributed.links.connection import Connection, queued_by_now
from pfeife.runtime.distributed.links.cuda_launch import check_launching
from pfeife.runtime.distributed.links.reducing import Beside, Route
from pfeife.runtime.distributed.links.warm_up import REDUCE
from pfeife.runtime.distributed.state.whole_state import Message
from pfeife.runtime.distributed.world.world import World
from pfeife.runtime.step import Layouts


class DistributedTransport(Buffered):
    """One rank of one pipeline of a mesh.

    Building one is collective: every rank of the world must do it with the same program. Every
    direction between two ranks has a process group of its own. Under NCCL opposite ones overlap
    only so. Under Gloo, who sends locks the connection; what then arrives on it keeps Gloo's
    thread asking the system again and again, to the sender's cost if both share a core.

    `apart` says that each replica has a batch of its own, and results of its own rows: these are
    broadcast `within` it.
    """

    def __init__(self, world: World, mesh: Mesh, program: Program, apart: bool = False):
        if mesh.size != world.size:
            raise ValueError(
                f"the mesh has {mesh.replicas} replicas of {mesh.ranks} ranks, the world has "
                f"{world.size} processes; start {mesh.size} (torchrun --nproc-per-node {mesh.size})"
            )
        super().__init__()
        self.world, self.mesh = world, mesh
        self.device: torch.device | None = world.device
        self.replica, self.rank = mesh.place(world.rank)
        self.patience = world.patience
        # Of the members that share the work of this rank: while they compute, and beside that.
        self.group = self._among_members("members")
        told = kept_by_stage(program) or any(each.split for each in program.reductions)
        self.beside = self._among_members(REDUCE) if told else None
        self.routes = self._routes(program)
        self.out: dict[int, Outgoing] = {}
        self.into: dict[int, Incoming] = {}
        # All ranks make all connections in this order: who makes one waits for its other members.
        self._connect(program)
        self.within: Connection | None = None  # None for all ranks
        each = (pipeline for own in mesh.each_member for pipeline in own.pipelines)
        for pipeline in each if apart else ():
            # All ranks make the connections of all pipelines, in one order.
            connection = world.connection_of(pipeline, "results")
            if world.rank in pipeline:
                self.within = connection
        if world.nccl:
            check_launching(world.streams)
        buckets = [route.bucket for route in self.routes.values()]
        scratch = (bucket.scratch_bytes(self.replica, mesh.member) for bucket in buckets)
        largest = max(scratch, default=0)  # of the buckets, which use it one after another
        self.buffers = Buffers(self.device, world.ends.memory, largest)
        # Under NCCL the host is ahead: after which waits of which actions the device is.
        self.at: Callable[[], int] | None = None
        self.marks: list[tuple[int, Any]] = []

    def for_step(self) -> "DistributedTransport":
        """The same transport with messages of its own: steps may overlap, and each knows when
        its own messages have arrived."""
        self.buffers.forget_used()
        for end in self.out.values():
            end.forget_unused()
        transport = copy.copy(self)
        # Its messages are its own; connections and buffers are those of all steps.
        Buffered.__init__(transport)
        transport.marks = []
        return transport

    def behind(self) -> int | None:
        """The number of the action that the device is in, None if it has got all messages."""
        return next((at for at, event in list(self.marks) if not event.query()), None)

    def _routes(self, program: Program) -> dict[str, Route]:
        """How this rank's buckets travel, by their first gradients. Every set of ranks that reduces
        together has a process group, all of which are made in one order."""
        routes = {}
        for bucket in buckets_of(program):
            if bucket.sparse and self.world.nccl:
                raise ValueError(
                    f"the gradient of {bucket.first.name!r} is sparse, and NCCL adds up dense ones "
                    "alone: make its embedding with sparse=False, or use Gloo on CPUs"
                )
            for members in self._members(bucket.first):
                # Where one rank has all of a part, its members alone tell one another.
                several = len(members) > 1
                connection = self.world.connection_of(members, REDUCE) if several else self.beside
                if connection is not None and self.world.rank in members:
                    place = self.mesh, self.replica
                    routes[bucket.first.name] = Route(bucket, *place, connection, self.beside)
        return routes

    def _among_members(self, purpose: str) -> Connection | None:
        """That of this rank's members; all ranks make those of all groups, in one order."""
        groups = self.mesh.groups if self.mesh.members > 1 else ()
        connections = [self.world.connection_of(group, purpose) for group in groups]
        return next((each for each in connections if each.mine), None)

    def _members(self, first: Reduction) -> list[list[int]]:
        """Ranks of the world that reduce a gradient together: of each replica and member, or of all
        replicas, of all members."""
        together: dict[tuple[int, int], list[int]] = {}
        places = itertools.product(self.mesh.each_member, range(self.mesh.replicas), first.ranks)
        for mesh, replica, rank in places:
            of = 0 if first.members > 1 else mesh.member, 0 if first.replicas > 1 else replica
            together.setdefault(of, []).append(mesh.in_world(replica, rank))
        return [sorted(ranks) for ranks in together.values()]

    def _in_world(self, rank: int) -> int:
        """The rank of the world that is a rank of this one's pipeline."""
        return self.mesh.in_world(self.replica, rank)

    def _connect(self, program: Program) -> None:
        used = sorted({(m.source, m.destination) for m in messages(program)})
        for mesh, replica in itertools.product(self.mesh.each_member, range(self.mesh.replicas)):
            for source, destination in used:
                pair = mesh.in_world(replica, source), mesh.in_world(replica, destination)
                end = self.world.ends.of(*pair)
                if isinstance(end, Outgoing):
                    self.out[destination] = end
                elif end is not None:
                    self.into[source] = end

    def _posted(self, source: int, envelope: Envelope) -> tuple[Tensors, Works]:
        return self._receiving(source, *envelope.opening.empty(self.device, self.buffers.take))

    def _whole(self, source: int, arrived: Tensors, envelope: Envelope) -> Tensors:
        def bring(rest: Envelope) -> Tensors:  # its sizes may be others each time: no buffers stay
            values, works = self._receiving(source, *rest.empty(self.device))
            self._wait(source, works)
            return values

        return envelope.whole(arrived, bring)

    def _receiving(
        self, source: int, values: Tensors, buffers: Sequence[torch.Tensor]
    ) -> tuple[Tensors, Works]:
        with self.world.reaching(self._in_world(source)):
            return values, self.into[source].post(buffers)

    def _sent(
        self, destination: int, values: Tensors, envelope: Envelope
    ) -> tuple[Works, list[torch.Tensor]]:
        with self.world.reaching(self._in_world(destination)):
            return self.out[destination].send(values, envelope)

    def _wait(self, peer: int, works: Works) -> None:
        with self.world.waiting(self._in_world(peer)):
            for work in works:
                work.wait(*self.patience)
            if self.world.nccl and self.at is not None:
                self.marks.append((self.at(), queued_by_now(self.world.device)))

    def wait(self, work: dist.Work) -> None:
        """Waits for a collective of the members."""
        self.world.wait(work)

    def unshard(self, ports: Sequence[Port], layouts: Layouts, state: State) -> Beside:
        """Begins to tell members what this rank keeps, and to be told what others do."""
        assert self.beside is not None
        told = tellings(ports, self.mesh.members)
        messages = [Message(telling, state, self.beside) for telling in told]
        touched = [each for message in messages for each in (*message.rooms, message.sent)]

        def run() -> None:
            for message in messages:
                message.run()

        def values() -> dict[str, torch.Tensor]:
            each = (message.values(layouts) for message in messages)
            return dict(itertools.chain.from_iterable(each))

        return Beside(self.world.reducer.begin(run, touched), self.world.wait, values)

    def reduce(self, bucket: Bucket, parts: Sequence[torch.Tensor]) -> Beside:
        """Begins to reduce a bucket, beside what the rank computes."""
        route, reducer, wait = self.routes[bucket.first.name], self.world.reducer, self.world.wait
        # The job runs beside what the rank computes, in the order of the schedule on every rank.
        if bucket.sparse:
            totals = [part.coalesce() for part in parts]
            begun = reducer.begin(lambda: route.run_sparse(totals), totals)
            names = [reduction.name for reduction in bucket.reductions]
            return Beside(begun, wait, lambda: dict(zip(names, totals, strict=True)))
        flat = route.packed(parts)
        scratch = self.buffers.scratch
        owned_sum = flat.new_empty(route.piece) if bucket.owned else None
        sums = flat if owned_sum is None else owned_sum
        result = route.room(flat) if bucket.cut else route.sums(sums)

        def run() -> None:
            if bucket.members > 1:
                route.run(flat, scratch, owned_sum)
            if bucket.cut and bucket.share(self.replica, self.mesh.member):
                route.join(sums, scratch, result)

        begun = reducer.begin(run, (flat, scratch, sums, *result.values()))
        return Beside(begun, wait, lambda: result, (flat, sums))
