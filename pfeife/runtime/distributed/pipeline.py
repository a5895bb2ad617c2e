"""A rank a process: its part of the schedule, and what all ranks are told of the result."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch

from pfeife.data.machine import Mesh
from pfeife.data.schedule import Schedule
from pfeife.ir.combine import add, mean
from pfeife.ir.evaluate import Result, State, averaged, with_statistics
from pfeife.ir.microbatch import Counted, counts_of
from pfeife.ir.parts import Port, Role
from pfeife.ir.program import Program
from pfeife.lowering.envelope import Envelope, Tensors, envelope_of
from pfeife.runtime.distributed.control.packing import pack, views
from pfeife.runtime.distributed.links.collectives import Collectives
from pfeife.runtime.distributed.links.connection import Connection
from pfeife.runtime.distributed.links.tangent_check import compared, sketch
from pfeife.runtime.distributed.liveness.heartbeat import Activity
from pfeife.runtime.distributed.process_group import join_world
from pfeife.runtime.distributed.state.whole_state import check_kept
from pfeife.runtime.distributed.transport import DistributedTransport
from pfeife.runtime.distributed.world.batch_norms import statistics_of_all
from pfeife.runtime.distributed.world.world import World
from pfeife.runtime.failure import CollectiveError, describe
from pfeife.runtime.interpret import RankRunner
from pfeife.runtime.peak import peak_bytes
from pfeife.runtime.phase_guard import PhaseGuard
from pfeife.runtime.pipeline import Pipeline, PipelineStep
from pfeife.runtime.results import owner, trained_on
from pfeife.runtime.step import Part, Step, Watch


class DistributedPipeline(Pipeline["DistributedStep"]):
    """This process's rank of a program and its lowered schedule.

    Building one is collective: all ranks check that they have the same program and schedule. A
    step returns the loss and the outputs on every rank, and the gradients and buffers of this
    rank's stages. `timeout` is after how many seconds without progress inside of a step a rank is
    given up (300 unless the world has been told another).

    With `apart` a rank is given the microbatches of its own replica alone: what a step is started
    with has `Counted` in the places of the others (see `known`), and results with rows are those
    of its own.

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
        mesh: Mesh | None = None,
        apart: bool = False,
    ):
        super().__init__(program, schedule)
        program = self.program
        self.device, self.timeout = device or torch.device("cpu"), timeout
        self.apart = apart
        world = self._world()
        ranks = len(schedule.ranks)
        mesh = mesh or Mesh(ranks, program.replicas, members=program.members)
        if mesh.members != program.members:
            raise ValueError(
                f"the mesh has groups of {mesh.members} members, the program is for "
                f"{program.members}"
            )
        self.mesh = mesh.of_member(world.rank) if world.rank < mesh.size else mesh
        with world.building("a pipeline"):
            world.check_agreement(f"{program}\n{schedule.to_csv()}", "what the ranks will run")
            self.transport = DistributedTransport(world, self.mesh, program, apart)
            if program.members > 1:
                collectives = Collectives(lambda: self.transport)  # another one after a failure
                bodies = collectives.of_rank(program, self.transport.rank, bodies or {})
            self.runner = RankRunner(program, schedule, self.transport.rank, bodies or {})
            place = self.transport.rank, self.transport.replica, self.mesh.member
            self.gradients = trained_on(program, *place)

    def _world(self) -> World:
        world = join_world(self.device, self.timeout)
        if world is None:
            raise ValueError("a DistributedPipeline wants several processes: start it by torchrun")
        return world

    @contextlib.contextmanager
    def _starting(self) -> Iterator[range]:
        """On this rank inputs that do not fit are refused before anything is sent; the others raise
        PipelineError."""
        world = self._world()
        # Inside, so that a rank whose inputs do not fit stops the others before they wait for it.
        with world.busy(lambda: Activity("the inputs of a step")):
            if world is not self.transport.world:  # after a failure
                self.transport = DistributedTransport(world, self.mesh, self.program, self.apart)
            yield range(self.transport.replica, self.transport.replica + 1)

    @property
    def given(self) -> range:
        """The microbatches that a rank is given."""
        if not self.apart:
            return range(self.microbatches)
        share, (replica, _) = self.schedule.microbatches, self.mesh.place(self._world().rank)
        return range(replica * share, (replica + 1) * share)

    def known(self, microbatches: Sequence[Any], of_rank_zero: bool = False) -> list[Any]:
        """All microbatches, as far as they are known here, of those that this rank is `given`
        (collective if these are not all, or if rank 0 alone has all their values)."""
        whole: list[Any] = [Counted(())] * self.microbatches
        whole[self.given.start : self.given.stop] = microbatches
        if not self.program.counts or not (self.apart or of_rank_zero):
            return whole
        world = self._world()
        with world.busy(lambda: Activity("the counts of a batch")):
            if of_rank_zero:
                table = (
                    self._counted(microbatches)
                    if world.rank == 0
                    else self._counts(len(microbatches))
                )
                world.broadcast(table.view(torch.uint8), 0)
            else:
                gathered = world.gather(self._counted(microbatches))
                table = torch.cat([gathered[ranks[0]] for ranks in self.mesh.pipelines])
        return [
            Counted(row.unbind(), microbatch) for row, microbatch in zip(table, whole, strict=True)
        ]

    def _counts(self, microbatches: int) -> torch.Tensor:
        """Room for what microbatches count."""
        shape = microbatches, len(self.program.counts)
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def _counted(self, microbatches: Sequence[Any]) -> torch.Tensor:
        counts = self._counts(len(microbatches))
        for row, microbatch in zip(counts, microbatches, strict=True):
            row.copy_(torch.stack(counts_of(self.program, microbatch)))
        return counts

    def reads(self, batch: Mapping[Port, torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        """What of a batch each rank of the world reads: the rows of its replica's microbatches, of
        what its stages use."""
        by_rank: dict[int, list[torch.Tensor]] = {rank: [] for rank in range(self.mesh.size)}
        for port, value in batch.items():
            for rank, replica in product(self._readers[port.name], range(self.mesh.replicas)):
                rows = self._rows_of(replica, port, value.detach())
                for mesh in self.mesh.each_member:
                    by_rank[mesh.in_world(replica, rank)].append(rows)
        return by_rank

    def _rows_of(self, replica: int, port: Port, value: torch.Tensor) -> torch.Tensor:
        if port.role != Role.BATCH or self.program.replicas == 1:
            return value
        return value.chunk(self.program.replicas, port.batch_dim or 0)[replica]

    @functools.cached_property
    def _readers(self) -> dict[str, list[int]]:
        """The ranks of a pipeline whose calls use an input, by its port's name; all of them where
        it is used outside of calls."""
        everyone = list(range(self.mesh.ranks))
        ranks = {call.node: call.rank or 0 for call in self.program.calls}
        return {
            node.name: sorted({ranks[user.name] for user in node.users})
            if all(user.name in ranks for user in node.users)
            else everyone
            for node in self.program.module.graph.nodes
            if node.op == "placeholder"
        }

    def _started(self, state: State, parts: Sequence[Part]) -> "DistributedStep":
        transport = self.transport.for_step()
        for port in self.runner.state:
            if port.keeper == self.mesh.member:
                check_kept(port, state[port.fqn])
        return DistributedStep(self, self.runner.start(state, parts[0], transport), transport)


class DistributedStep(PipelineStep):
    """One rank's step, which may be run phase by phase, each once.

    After a failure, also of another rank, it has no results: to ask for them raises.
    """

    def __init__(self, pipeline: DistributedPipeline, step: Step, transport: DistributedTransport):
        self.pipeline, self.step, self.transport = pipeline, step, transport
        self.steps = [step]
        self.spent = self.worked = 0.0  # seconds in this step, and those that are not waiting
        self.figures: Sequence[Sequence[float]] = ()  # the seconds of work and peak of each rank
        self.phases = PhaseGuard(pipeline.runner.has_phases)

    def run(
        self, *, forward: bool = True, backward: bool = True, watch: Watch | None = None
    ) -> None:
        """Runs the forward actions, the backward actions, or all; `watch` sees them. Raises
        PipelineError if any other rank fails, RuntimeError for a phase that has run already."""
        runner, world = self.pipeline.runner, self.transport.world
        border = runner.backward_start
        start, end = (0 if forward else border), (None if backward else border)
        before, waited = self.spent, world.waited
        # What cannot run is refused by each rank alone: to fail all for it would be heard by some
        # before they have asked.
        with self._timed(), self.phases.running(forward, backward), world.busy(self._doing):
            self.transport.at = lambda: self.step.at
            try:
                runner.run(self.step, start, end, watch(runner.rank) if watch else None)
                self.transport.finish()
            finally:
                self.transport.at = None  # or it would keep the step
        self.worked += self.spent - before - (world.waited - waited)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """While it takes this rank's time."""
        begun = time.monotonic()
        yield
        self.spent += time.monotonic() - begun

    def _doing(self) -> Activity:
        """Read by the monitor's thread."""
        actions = self.pipeline.runner.actions
        where = describe(actions[self.step.at]) if actions else "a step"
        return Activity(where)

    def _sharing(self) -> Activity:
        """Read by the monitor's thread."""
        text, behind = "sharing the results of a step", self.transport.behind()
        if behind is not None:
            text += f", its device in {describe(self.pipeline.runner.actions[behind])}"
        return Activity(text)

    def preparing(self) -> contextlib.AbstractContextManager[None]:
        """While the backward is prepared, which fails on all ranks if it does on one."""
        return self.transport.world.busy(lambda: Activity("the gradients of a step's results"))

    def compare(self, tangents: Sequence[Mapping[str, torch.Tensor]], *, values: bool) -> None:
        """Raises CollectiveError on all ranks unless they are at a backward from the same outputs;
        with `values` also unless they have the same gradients of these, to within rounding
        (collective)."""
        world = self.transport.world
        names = [name for part in tangents for name in part]
        world.agreed("\n".join(names), "the results that a backward starts at")
        if values:
            wrong = compared(world.gather(sketch(tangents).to(world.device)), tangents)
            if wrong:
                raise CollectiveError(wrong)

    def result(self, *, outputs: bool = True) -> Result:
        """Loss and outputs of the whole step, gradients and buffers of this rank; without
        `outputs` there are neither outputs nor buffers, for which ranks have been asked already.
        Raises PipelineError if any rank has failed, RuntimeError for a step that has not run."""
        with self._timed(), self.transport.world.busy(self._sharing):
            self.phases.check()
            rank_result = self.pipeline.runner.result(self.step)
            shared = self._shared(rank_result.outputs, Role.OUTPUT) if outputs else ()
            finished = "backward" in self.phases.done
            shared_gradients = (
                self._shared(rank_result.batch_gradients, Role.BATCH_GRADIENT) if finished else ()
            )
            batch_gradients = averaged(self.pipeline.program, shared_gradients)
            buffers = self._with_statistics(rank_result).buffers if outputs else {}
            gradients = self._own_gradients(rank_result.gradients)
            # Last, since every rank waits here for all: either all have a result, or none has.
            loss, overflow, self.figures = self._loss(rank_result)
            return Result(loss, shared, gradients, buffers, batch_gradients, overflow)

    def _own_gradients(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Without those that other members keep."""
        ports, here = self.pipeline.program.ports(Role.GRADIENT), self.pipeline.mesh.member
        own = {port.fqn for port in ports if port.keeper in (None, here)}
        return {name: gradient for name, gradient in gradients.items() if name in own}

    def _with_statistics(self, rank_result: Result) -> Result:
        program, world, mesh = self.pipeline.program, self.transport.world, self.pipeline.mesh
        statistics = statistics_of_all(program, rank_result, world, mesh)
        return with_statistics(program, rank_result, statistics, self.step.sizes)

    @property
    def waiting(self) -> tuple[float, ...]:
        """The seconds in which each rank waited for others; none on GPUs, whose hosts are ahead."""
        on_cuda = self.pipeline.device.type == "cuda"
        return () if on_cuda else tuple(max(0.0, self.spent - work) for work, _ in self.figures)

    @property
    def peaks(self) -> tuple[int, ...]:
        """The bytes of each process at its peak so far."""
        return tuple(int(peak) for _, peak in self.figures)

    def _loss(
        self, rank_result: Result
    ) -> tuple[torch.Tensor | None, torch.Tensor, Sequence[Sequence[float]]]:
        """The mean or sum of the replicas' losses, in their order; whether any rank has a gradient
        that is not finite; the figures of each rank. Every rank gives something, those without a
        loss zero: nobody goes on before all have come."""
        program, mesh = self.pipeline.program, self.pipeline.mesh
        ports, device = program.ports(Role.LOSS), self.pipeline.device
        loss = torch.zeros(1, dtype=ports[0].dtype if ports else torch.uint8, device=device)
        if rank_result.loss is not None:
            loss.copy_(rank_result.loss)
        flag = _overflows(rank_result.gradients.values()).to(device)
        measured = [self.worked, float(peak_bytes(device))]
        parts = [torch.tensor(measured, dtype=torch.float64, device=device), loss, flag]
        gathered = self.transport.world.gather(pack(parts, device))
        figures, losses, flags = zip(*(views(message, parts) for message in gathered), strict=True)
        # One copy to the host: it waits there for the device.
        every, overflow = torch.stack(figures).tolist(), torch.stack(flags).any()
        if not ports:
            return None, overflow, every
        first, shape = owner(program, ports[0]), ports[0].shape_at(self.step.sizes)
        owners = [mesh.in_world(replica, first) for replica in range(mesh.replicas)]
        # What is returned must not keep the whole message.
        whole = [losses[rank].clone().reshape(shape) for rank in owners]
        return (mean if program.averages else add)(whole), overflow, every

    def _shared(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]], role: Role
    ) -> tuple[dict[str, torch.Tensor], ...]:
        """Every microbatch's values of a role, from the ranks that made them to all, or rows to
        those that have the same batch: one broadcast from each of these."""
        program, transport = self.pipeline.program, self.transport
        sources: dict[tuple[int, bool], list[Port]] = {}
        for port in program.ports(role):
            rows = role == Role.BATCH_GRADIENT or port.batch_dim is not None
            at = owner(program, port), rows and transport.within is not None
            sources.setdefault(at, []).append(port)
        shared: list[dict[str, torch.Tensor]] = [
            {} for _ in range(program.replicas) for _ in microbatches
        ]
        for replica in range(program.replicas):
            for (rank, within), ports in sources.items():
                # Rows of another replica stay there: nobody here has that batch.
                if within and replica != transport.replica:
                    continue
                # Members have the same results: all ranks of the world hear the first one's.
                mesh = transport.mesh if within else transport.mesh.each_member[0]
                source = mesh.in_world(replica, rank)
                keys = [(index, port) for index in range(len(microbatches)) for port in ports]
                among = transport.within if within else None
                values = self._from(source, microbatches, keys, among)
                for (index, port), value in zip(keys, values, strict=True):
                    shared[replica * len(microbatches) + index][port.fqn] = value
        return tuple(shared)

    def _from(
        self,
        source: int,
        microbatches: Sequence[Mapping[str, torch.Tensor]],
        keys: Sequence[tuple[int, Port]],
        among: Connection | None,
    ) -> Tensors:
        world = self.transport.world
        by_data = tuple(i for i, (_, port) in enumerate(keys) if port.sized_by_data)
        sizes = self.step.sizes
        envelope = _dense(tuple((port.shape_at(sizes), port.dtype) for _, port in keys), by_data)
        if world.rank == source:
            values = tuple(microbatches[index][port.fqn].contiguous() for index, port in keys)
            for piece in envelope.pack(values):
                world.broadcast(piece, source, among)
            return values
        bring = functools.partial(self._broadcast, source, among)
        return envelope.whole(bring(envelope.opening), bring)

    def _broadcast(self, source: int, among: Connection | None, envelope: Envelope) -> Tensors:
        """The values that a rank broadcasts."""
        values, pieces = envelope.empty(self.pipeline.device)
        for piece in pieces:
            self.transport.world.broadcast(piece, source, among)
        return values


def _overflows(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Whether one of them is not finite."""
    dense = [
        gradient
        for gradient in gradients
        if gradient.is_floating_point() and gradient.layout == torch.strided and gradient.numel()
    ]
    largest = torch.nn.utils.get_total_norm(dense, float("inf"))
    return ~largest.isfinite()


@functools.lru_cache(maxsize=64)
def _dense(
    kinds: tuple[tuple[tuple[int, ...], torch.dtype], ...], by_data: tuple[int, ...]
) -> Envelope:
    """The message of contiguous values of such shapes and dtypes, of which data decide the sizes
    of those at the places `by_data`; every step asks for the same."""
    values = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in kinds]
    return envelope_of(values, by_data)
