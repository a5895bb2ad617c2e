"""A rank a process: sends, receives and reductions by torch.distributed (Gloo, NCCL)."""

import atexit
import copy
import hashlib
import os
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pfeife.evaluate import Result, State, averaged, mean
from pfeife.plan import Mesh, Schedule
from pfeife.program import Port, Program, Reduction, Role
from pfeife.runtime.interpret import (
    Layouts,
    RankRunner,
    Step,
    Tensors,
    Watch,
    microbatch_inputs,
    owner,
)

AHEAD = 2  # messages of a channel whose receives are posted before they are asked for


class DistributedTransport:
    """One rank of one pipeline of a mesh, over the default process group.

    Building one is collective: every rank of the world must do it with the same program.
    """

    def __init__(self, mesh: Mesh, reductions: Sequence[Reduction], device: torch.device):
        world = dist.get_world_size()
        if mesh.size != world:
            raise ValueError(
                f"the mesh has {mesh.replicas} replicas of {mesh.ranks} ranks, the world has "
                f"{world} processes; start {mesh.size} (torchrun --nproc-per-node {mesh.size})"
            )
        self.mesh = mesh
        self.device: torch.device | None = device
        self.replica, self.rank = divmod(dist.get_rank(), mesh.ranks)
        self.offset = self.replica * mesh.ranks
        self.groups = self._groups(reductions)
        self.waiting: dict[int, deque[tuple[Tensors, list[dist.Work]]]] = {}
        self.announced: dict[int, deque[Layouts]] = {}
        self.leaving: dict[int, deque[tuple[list[dist.Work], Tensors]]] = {}
        self.finished: Counter[int] = Counter()

    def for_step(self) -> "DistributedTransport":
        """The same transport with sent messages of its own: steps may overlap, and each knows
        when its own messages have arrived."""
        other = copy.copy(self)
        other.leaving, other.finished = {}, Counter()
        return other

    def _groups(self, reductions: Sequence[Reduction]) -> dict[tuple[int, ...], Any]:
        """A process group for every set of ranks that reduces together, made in one order."""
        wanted: dict[tuple[int, ...], None] = {}
        for reduction in reductions:
            for replica in range(self.mesh.replicas):
                wanted[self._members(reduction, replica)] = None
        return {members: dist.new_group(list(members)) for members in wanted if len(members) > 1}

    def _members(self, reduction: Reduction, replica: int) -> tuple[int, ...]:
        replicas = range(self.mesh.replicas) if reduction.replicas > 1 else (replica,)
        return tuple(r * self.mesh.ranks + rank for r in replicas for rank in reduction.ranks)

    def expect(self, source: int, messages: Sequence[Layouts]) -> None:
        self.announced.setdefault(source, deque()).extend(messages)
        self._post(source)

    def _post(self, source: int) -> None:
        waiting = self.waiting.setdefault(source, deque())
        announced = self.announced[source]
        while announced and len(waiting) < AHEAD:
            buffers = tuple(layout.empty(self.device) for layout in announced.popleft())
            works = [dist.irecv(_flat(one), self.offset + source) for one in buffers]
            waiting.append((buffers, works))  # type: ignore[arg-type]

    def send(self, destination: int, values: Tensors, layouts: Layouts) -> None:
        laid_out = tuple(
            value if value.stride() == layout.strides else layout.copy(value)
            for value, layout in zip(values, layouts, strict=True)
        )
        works = [dist.isend(_flat(value), self.offset + destination) for value in laid_out]
        leaving = self.leaving.setdefault(destination, deque())
        leaving.append((works, laid_out))  # type: ignore[arg-type]

    def release(self, destination: int, count: int) -> None:
        # Gloo's sends say that they are completed only when they have been waited for, so it
        # matters to know without asking when that takes no time.
        known = min(count, self.finished[destination])
        self.finished[destination] -= known
        for _ in range(count - known):
            self._wait_for_first(destination)

    def _wait_for_first(self, destination: int) -> None:
        for work in self.leaving[destination].popleft()[0]:
            work.wait()

    def receive(self, source: int) -> Tensors:
        buffers, works = self.waiting[source].popleft()
        for work in works:
            work.wait()
        self._post(source)
        return buffers

    def reduce(self, reduction: Reduction, part: torch.Tensor) -> torch.Tensor:
        """Sums by all-reduce (its order of additions is the backend's), then averages."""
        group = self.groups.get(self._members(reduction, self.replica))
        total = part.clone(memory_format=torch.contiguous_format)
        if group is not None:
            dist.all_reduce(total, group=group)
        return total / reduction.replicas if reduction.average else total

    def finish(self) -> None:
        """Waits until all that this step has sent has arrived."""
        for destination, leaving in self.leaving.items():
            while leaving:
                self._wait_for_first(destination)
                self.finished[destination] += 1


def _flat(value: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as bytes, which every backend sends."""
    return value.as_strided((value.numel(),), (1,)).view(torch.uint8)


class DistributedPipeline:
    """This process's rank of a program and its lowered schedule.

    Building one is collective. A step returns the loss and the outputs on every rank, and the
    gradients and buffers of this rank's stages.
    """

    def __init__(self, program: Program, schedule: Schedule, device: torch.device | None = None):
        self.program = program
        self.device = device or torch.device("cpu")
        mesh = Mesh(len(schedule.ranks), program.replicas)
        self.transport = DistributedTransport(mesh, program.reductions, self.device)
        self.runner = RankRunner(program, schedule, self.transport.rank)
        self.microbatches = schedule.microbatches * program.replicas

    def start(
        self,
        state: State,
        microbatches: Sequence[Any],
        *,
        seed: int = 0,
        tangents: Sequence[Mapping[str, torch.Tensor]] | None = None,
    ) -> "DistributedStep":
        """A step that has not run yet. Raises ValueError for inputs that do not fit."""
        if len(microbatches) != self.microbatches:
            raise ValueError(
                f"{len(microbatches)} microbatches, the schedule is for {self.microbatches}"
            )
        inputs = microbatch_inputs(
            self.program, microbatches, seed, tangents, self.transport.replica
        )
        return DistributedStep(self, self.runner.start(state, inputs, self.transport.for_step()))

    def __call__(self, state: State, microbatches: Sequence[Any], **options: Any) -> Result:
        """One step: the same arguments as `evaluate`."""
        step = self.start(state, microbatches, **options)
        step.run()
        return step.result()


class DistributedStep:
    """One rank's step, which may be run in parts."""

    def __init__(self, pipeline: DistributedPipeline, step: Step):
        self.pipeline, self.step = pipeline, step

    def run(
        self, *, forward: bool = True, backward: bool = True, watch: Watch | None = None
    ) -> None:
        """Runs the forward actions, the backward actions, or all; `watch` sees them."""
        runner = self.pipeline.runner
        border = runner.backward_begin
        begin, end = (0 if forward else border), (None if backward else border)
        runner.run(self.step, begin, end, watch(runner.rank) if watch else None)
        assert isinstance(self.step.transport, DistributedTransport)
        self.step.transport.finish()

    def set_tangents(self, tangents: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """The gradients of the outputs, per microbatch by port name, before the backward."""
        each = len(self.step.values)
        start = self.pipeline.transport.replica * each
        for values, given in zip(self.step.values, tangents[start : start + each], strict=True):
            values.update(given)

    def result(self, *, outputs: bool = True) -> Result:
        """Loss and outputs of the whole step, gradients and buffers of this rank; without
        `outputs` those that every rank has got already are left out."""
        mine = self.pipeline.runner.result(self.step)
        return Result(
            loss=self._loss(mine),
            outputs=self._shared(mine.outputs, Role.OUTPUT) if outputs else (),
            gradients=mine.gradients,
            buffers=mine.buffers,
            batch_gradients=averaged(
                self.pipeline.program, self._shared(mine.batch_gradients, Role.BATCH_GRADIENT)
            ),
        )

    def _loss(self, mine: Result) -> torch.Tensor | None:
        """The mean of the replicas' losses, in their order."""
        ports = self.pipeline.program.ports(Role.LOSS)
        if not ports:
            return None
        replicas = self.pipeline.program.replicas
        losses = [self._broadcast(ports[0], mine.loss, replica) for replica in range(replicas)]
        return mean(losses) if replicas > 1 else losses[0]

    def _shared(self, mine: Sequence[Mapping[str, torch.Tensor]], role: Role) -> tuple:
        """Every microbatch's values of a role, from the ranks that made them to all."""
        return tuple(
            {
                port.fqn: self._broadcast(port, found.get(port.fqn), replica)
                for port in self.pipeline.program.ports(role)
            }
            for replica in range(self.pipeline.program.replicas)
            for found in mine
        )

    def _broadcast(self, port: Port, value: torch.Tensor | None, replica: int) -> torch.Tensor:
        transport = self.pipeline.transport
        source = replica * transport.mesh.ranks + owner(self.pipeline.program, port)
        if dist.get_rank() == source:
            assert value is not None
            shared = value.contiguous()
        else:
            shared = torch.empty(port.shape, dtype=port.dtype, device=self.pipeline.device)
        dist.broadcast(_flat(shared), source)
        return shared


def from_rank_zero(text: str, device: torch.device) -> str:
    """Rank 0's text, on every rank (collective)."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    size = torch.tensor([data.numel()], device=device)
    dist.broadcast(size, 0)
    shared = (
        data if dist.get_rank() == 0 else torch.empty(int(size), dtype=torch.uint8, device=device)
    )
    dist.broadcast(shared, 0)
    return bytes(shared.tolist()).decode()


def decided_by_rank_zero(decide: Callable[[], str], device: torch.device) -> str:
    """What rank 0 decides, on every rank (collective). If that raises a ValueError there, all
    ranks raise it."""
    text = ""
    if dist.get_rank() == 0:
        try:
            text = "+" + decide()
        except ValueError as error:
            text = "-" + str(error)
    shared = from_rank_zero(text, device)
    if shared.startswith("-"):
        raise ValueError(shared[1:])
    return shared[1:]


def from_all_ranks(text: str, device: torch.device) -> list[str]:
    """Every rank's text, on every rank (collective)."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    size = torch.tensor([data.numel()], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded)
    return [
        bytes(one[: int(count)].tolist()).decode() for one, count in zip(found, sizes, strict=True)
    ]


def check_agreement(text: str, what: str, device: torch.device) -> None:
    """Raises ValueError on every rank unless all ranks give the same text (collective)."""
    digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), device=device)
    found = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(found, digest)
    others = [rank for rank, other in enumerate(found) if not torch.equal(other, found[0])]
    if others:
        raise ValueError(
            f"{what}: ranks {others} have another one than rank 0; every rank must run the same "
            "script with the same shapes and options"
        )


def differing(tensors: Mapping[str, torch.Tensor], device: torch.device) -> list[str]:
    """Names of the tensors that are not the same on all ranks, by checksums (collective)."""
    sums = [_checksum(tensor) for tensor in tensors.values()]
    mine = (
        torch.stack(sums).to(device) if sums else torch.zeros(0, dtype=torch.int64, device=device)
    )
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    wrong = torch.stack([other != found[0] for other in found]).any(0).tolist()
    return [name for name, differs in zip(tensors, wrong, strict=True) if differs]


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    odd = data[::3].sum(dtype=torch.int64)  # so that swapped bytes are seen as well
    return data.sum(dtype=torch.int64) * 1_000_003 + odd


def join_world(device: torch.device) -> int:
    """How many processes this one works with, 1 if it is alone; initialises the default process
    group if torchrun started several and nobody has done so."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(leave_world)
    return dist.get_world_size() if dist.is_initialized() else 1


def leave_world() -> None:
    """Ends the default process group if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_rank() -> int:
    """This process's rank, 0 if it is alone; before the world is joined what torchrun says."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
