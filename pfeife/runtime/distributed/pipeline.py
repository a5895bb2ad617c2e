"""A rank a process: sends, receives and reductions by torch.distributed (Gloo, NCCL)."""

import contextlib
import copy
import functools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pfeife.data.machine import Mesh
from pfeife.data.schedule import Schedule
from pfeife.ir.evaluate import Result, State, add, averaged, loss_divisors, mean
from pfeife.ir.program import Port, Program, Reduction, Role, messages
from pfeife.lowering.envelope import APART, Channel, Envelope, Layout, Tensors
from pfeife.runtime.distributed.arriving import compared, sketch
from pfeife.runtime.distributed.buffers import Buffers
from pfeife.runtime.distributed.connection import Connection
from pfeife.runtime.distributed.heartbeat import Doing
from pfeife.runtime.distributed.process_group import join_world
from pfeife.runtime.distributed.sending import Sending
from pfeife.runtime.distributed.world import World
from pfeife.runtime.failure import Refusal, describe
from pfeife.runtime.interpret import RankRunner, Step, Watch, microbatch_inputs, owner
from pfeife.runtime.parts import Parts

End = tuple[Connection, int]  # and the other rank as its group counts
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
        self.inboxes: dict[int, _Inbox] = {}
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

    def _groups(self, reductions: Sequence[Reduction]) -> dict[tuple[int, ...], Connection]:
        """A process group for every set of ranks that reduces together, made in one order."""
        wanted: dict[tuple[int, ...], None] = {}
        for reduction in reductions:
            for replica in range(self.mesh.replicas):
                wanted[self._members(reduction, replica)] = None
        several = [members for members in wanted if len(members) > 1]
        return {members: self.world.connection_of(members, "reduce") for members in several}

    def _members(self, reduction: Reduction, replica: int) -> tuple[int, ...]:
        replicas = range(self.mesh.replicas) if reduction.replicas > 1 else (replica,)
        return tuple(r * self.mesh.ranks + rank for r in replicas for rank in reduction.ranks)

    def _connect(self, program: Program) -> None:
        used = sorted({(m.source, m.destination) for m in messages(program)})
        for replica in range(self.mesh.replicas):
            offset = replica * self.mesh.ranks
            for source, destination in used:
                pair = (offset + source, offset + destination)
                way = "down" if source < destination else "up"
                connection = self.world.connection_of(sorted(pair), way)
                if pair[0] == self.world.rank:
                    self.out[destination] = (connection, connection.index(pair[1]))
                elif pair[1] == self.world.rank:
                    self.into[source] = (connection, connection.index(pair[0]))
                if self.world.rank in pair and self.world.device.type == "cuda":
                    self._first_message(connection, pair)

    def _first_message(self, connection: Connection, pair: tuple[int, int]) -> None:
        """NCCL connects with it, which both ends must wait for."""
        data = [torch.zeros(1, dtype=torch.uint8, device=self.device)]
        if pair[0] == self.world.rank:
            connection.group.send(data, connection.index(pair[1]), 0).wait()
        else:
            connection.group.recv(data, connection.index(pair[0]), 0).wait()

    def expect(self, source: int, channel: Channel) -> None:
        self.inboxes[source] = _Inbox(channel)
        self.waiting.setdefault(source, deque())
        self._post(source)

    def _post(self, source: int) -> None:
        waiting, (connection, peer) = self.waiting[source], self.into[source]
        for envelope in self.inboxes[source].due():
            values, buffers = envelope.empty(self.device, self.buffers.take)
            try:
                works = [connection.group.recv([one], peer, 0) for one in buffers]
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
        connection, peer = self.out[destination]
        if size >= APART and connection.device.type == "cpu":
            self.apart.add(destination)  # from now on: messages must not overtake one another
        try:
            if destination in self.apart:
                return self.world.sender.send(connection, pieces, peer)
            return [connection.group.send([piece], peer, 0) for piece in pieces]
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
        connection = self.groups.get(self._members(reduction, self.replica))
        total = part.clone(memory_format=torch.contiguous_format)
        if connection is not None:
            self.world.wait(connection.group.allreduce(total))
        return total / reduction.replicas if reduction.average else total

    def finish(self) -> None:
        """Waits until all that this step has sent has arrived."""
        for destination, leaving in self.leaving.items():
            while leaving:
                self._wait(destination, leaving.popleft()[0])
                self.finished[destination] += 1


class _Inbox:
    """How far a channel's messages have been taken, and how far their receives are posted."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.taken = self.posted = 0

    def due(self) -> Sequence[Envelope]:
        """Those whose receives are to be posted now."""
        begin, self.posted = self.posted, self.channel.ahead[self.taken]
        return self.channel.envelopes[begin : self.posted]


class DistributedPipeline:
    """This process's rank of a program and its lowered schedule.

    Building one is collective: all ranks check that they have the same program and schedule. A
    step returns the loss and the outputs on every rank, and the gradients and buffers of this
    rank's stages. `timeout` is after how many seconds without progress inside of a step a rank is
    given up (300 unless the world has been told another).

    Raises ValueError for a program or schedule that other ranks do not have, PipelineError when
    a rank does not arrive. When a step fails on any rank it raises PipelineError on all others,
    and its own exception there; the next step connects the ranks anew.
    """

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        device: torch.device | None = None,
        bodies: Mapping[str, Callable] | None = None,
        *,
        timeout: float | None = None,
    ):
        self.program, self.timeout = program, timeout
        self.device = device or torch.device("cpu")
        self.mesh = Mesh(len(schedule.ranks), program.replicas)
        self.microbatches = schedule.microbatches * program.replicas
        world = self._world()
        with world.building("a pipeline"):
            world.check_agreement(f"{program}\n{schedule.to_csv()}", "what the ranks will run")
            self.transport = DistributedTransport(world, self.mesh, program)
            self.runner = RankRunner(program, schedule, self.transport.rank, bodies)
            self.gradients = self.runner.gradients

    def _world(self) -> World:
        world = join_world(self.device, self.timeout)
        if world is None:
            raise ValueError("a DistributedPipeline wants several processes: start it by torchrun")
        return world

    def start(
        self,
        state: State,
        microbatches: Sequence[Any],
        *,
        seed: int = 0,
        tangents: Sequence[Mapping[str, torch.Tensor]] | None = None,
    ) -> "DistributedStep":
        """A step that has not run yet. Raises ValueError for inputs that do not fit, on this rank
        before anything is sent and PipelineError on the others."""
        world = self._world()
        with world.busy(lambda: Doing("the inputs of a step")):
            if world is not self.transport.world:  # after a failure
                self.transport = DistributedTransport(world, self.mesh, self.program)
            if len(microbatches) != self.microbatches:
                raise ValueError(
                    f"{len(microbatches)} microbatches, the schedule is for {self.microbatches}"
                )
            divided, replica = loss_divisors(self.program, microbatches), self.transport.replica
            inputs = microbatch_inputs(self.program, microbatches, seed, tangents, divided, replica)
            transport = self.transport.for_step()
            mine = divided[replica * len(inputs) : (replica + 1) * len(inputs)]
            step = self.runner.start(state, inputs, mine, transport)
            return DistributedStep(self, step, transport)

    def __call__(self, state: State, microbatches: Sequence[Any], **options: Any) -> Result:
        """One step: the same arguments as `evaluate`."""
        step = self.start(state, microbatches, **options)
        step.run()
        return step.result()


class DistributedStep:
    """One rank's step, which may be run in parts, each once.

    After a failure, also of another rank, it has no results: to ask for them raises.
    """

    def __init__(self, pipeline: DistributedPipeline, step: Step, transport: DistributedTransport):
        self.pipeline, self.step, self.transport = pipeline, step, transport
        self.parts = Parts(pipeline.runner.has_parts)

    def run(
        self, *, forward: bool = True, backward: bool = True, watch: Watch | None = None
    ) -> None:
        """Runs the forward actions, the backward actions, or all; `watch` sees them. Raises
        PipelineError if any other rank fails, RuntimeError for a part that has run already."""
        runner, world = self.pipeline.runner, self.transport.world
        border = runner.backward_begin
        begin, end = (0 if forward else border), (None if backward else border)
        with world.busy(self._doing), self.parts.running(forward, backward):
            runner.run(self.step, begin, end, watch(runner.rank) if watch else None)
            self.transport.finish()

    def _doing(self) -> Doing:
        """Read by the monitor's thread."""
        actions = self.pipeline.runner.actions
        where = describe(actions[self.step.at]) if actions else "a step"
        return Doing(where, *self.transport.awaited)

    def preparing(self) -> contextlib.AbstractContextManager[None]:
        """While the backward is prepared, which fails on all ranks if it does on one."""
        return self.transport.world.busy(lambda: Doing("the gradients of a step's results"))

    def compare(self, tangents: Sequence[Mapping[str, torch.Tensor]], *, values: bool) -> None:
        """Raises Refusal on all ranks unless they are at a backward from the same outputs; with
        `values` also unless they have the same gradients of these, to within rounding
        (collective)."""
        world = self.transport.world
        names = [name for part in tangents for name in part]
        world.agreed("\n".join(names), "the results that a backward begins at")
        if values:
            wrong = compared(world.gather(sketch(tangents).to(world.device)), tangents)
            if wrong:
                raise Refusal(wrong)

    def set_tangents(self, tangents: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """The gradients of the outputs, per microbatch by port name, before the backward."""
        each = len(self.step.values)
        start = self.transport.replica * each
        for values, given in zip(self.step.values, tangents[start : start + each], strict=True):
            values.update(given)

    def result(self, *, outputs: bool = True) -> Result:
        """Loss and outputs of the whole step, gradients and buffers of this rank; without
        `outputs` those that every rank has got already are left out. Raises PipelineError if any
        rank has failed, RuntimeError for a step that has not run."""
        with self.transport.world.busy(lambda: Doing("sharing the results of a step")):
            self.parts.check()
            mine = self.pipeline.runner.result(self.step)
            shared = self._shared(mine.outputs, Role.OUTPUT) if outputs else ()
            finished = "backward" in self.parts.done
            shared_gradients = (
                self._shared(mine.batch_gradients, Role.BATCH_GRADIENT) if finished else ()
            )
            batch_gradients = averaged(self.pipeline.program, shared_gradients)
            # Last, since every rank waits here for all: either all have a result, or none has.
            loss, overflow = self._loss(mine)
            return Result(loss, shared, mine.gradients, mine.buffers, batch_gradients, overflow)

    def _loss(self, mine: Result) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The mean or sum of the replicas' losses, in their order, and whether any rank has a
        gradient that is not finite. Every rank gives something, those without a loss zero: nobody
        goes on before all have come."""
        program, mesh = self.pipeline.program, self.pipeline.mesh
        ports = program.ports(Role.LOSS)
        dtype = ports[0].dtype if ports else torch.uint8
        given = torch.zeros(1, dtype=dtype, device=self.pipeline.device)
        if mine.loss is not None:
            given.copy_(mine.loss)
        flag = _overflows(mine.gradients.values()).to(given.device, torch.uint8).reshape(1)
        found = self.transport.world.gather(torch.cat([given.view(torch.uint8), flag]))
        overflow = torch.stack([one[-1] for one in found]).any()
        if not ports:
            return None, overflow
        first = owner(program, ports[0])
        losses = [one[:-1].clone() for one in found[first :: mesh.ranks]]
        whole = [one.view(dtype).reshape(ports[0].shape) for one in losses]
        return (mean if program.averages else add)(whole), overflow

    def _shared(
        self, mine: Sequence[Mapping[str, torch.Tensor]], role: Role
    ) -> tuple[dict[str, torch.Tensor], ...]:
        """Every microbatch's values of a role, from the ranks that made them to all: one
        broadcast from each of these."""
        program, transport = self.pipeline.program, self.transport
        sources: dict[int, list[Port]] = {}
        for port in program.ports(role):
            sources.setdefault(owner(program, port), []).append(port)
        found: list[dict[str, torch.Tensor]] = [{} for _ in range(program.replicas) for _ in mine]
        for replica in range(program.replicas):
            for rank, ports in sources.items():
                source = replica * transport.mesh.ranks + rank
                keys = [(index, port) for index in range(len(mine)) for port in ports]
                values = self._from(source, mine, keys)
                for (index, port), value in zip(keys, values, strict=True):
                    found[replica * len(mine) + index][port.fqn] = value
        return tuple(found)

    def _from(
        self,
        source: int,
        mine: Sequence[Mapping[str, torch.Tensor]],
        keys: Sequence[tuple[int, Port]],
    ) -> Tensors:
        world = self.transport.world
        envelope = _dense(tuple((port.shape, port.dtype) for _, port in keys))
        if world.rank == source:
            values = tuple(mine[index][port.fqn].contiguous() for index, port in keys)
            pieces = envelope.pack(values)
        else:
            values, pieces = envelope.empty(self.pipeline.device)
        for piece in pieces:
            world.broadcast(piece, source)
        return values


def _overflows(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Whether one of them is not finite."""
    found = [one for one in gradients if one.is_floating_point() and one.layout == torch.strided]
    largest = torch.nn.utils.get_total_norm(found, float("inf"))
    return ~largest.isfinite()


@functools.lru_cache(maxsize=64)
def _dense(kinds: tuple[tuple[tuple[int, ...], torch.dtype], ...]) -> Envelope:
    """The message of contiguous values of such shapes and dtypes; every step asks for the same."""
    values = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in kinds]
    return Envelope(tuple(Layout.of(value) for value in values))
