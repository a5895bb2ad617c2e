"""All ranks in one process: a thread for each, queues between them."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any

import attrs
import torch

from pfeife import _torch
from pfeife.data.schedule import Action, Schedule
from pfeife.ir.combine import add, mean
from pfeife.ir.evaluate import Result, State
from pfeife.ir.parts import Port, Reduction, Role
from pfeife.ir.program import Program
from pfeife.lowering.buckets import Bucket
from pfeife.lowering.channel import Channel
from pfeife.lowering.clocks import acknowledged
from pfeife.lowering.envelope import Envelope, Tensors
from pfeife.runtime.interpret import RankRunner
from pfeife.runtime.local.peer_copy import PeerCopies, made_by_now
from pfeife.runtime.local.threads import Caller, Threads
from pfeife.runtime.peak import peak_bytes
from pfeife.runtime.phase_guard import PhaseGuard
from pfeife.runtime.pipeline import Pipeline, PipelineStep, Tangents, moved
from pfeife.runtime.results import joined, trained_on
from pfeife.runtime.step import Beside, Layouts, Observer, Part, Step, Watch

TICK = 1.0  # seconds after which a wait looks for signals


class Aborted(RuntimeError):
    """Another rank failed, so this one stops."""


class LocalWorld:
    """What the threads of one step share. `failed` ends every wait."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.channels: dict[tuple[int, int], deque[tuple[Tensors, Any]]] = {}
        self.parts: dict[str, dict[int, torch.Tensor]] = {}
        self.reduced: dict[str, tuple[torch.Tensor, float]] = {}  # and when that was done
        self.failed = threading.Event()

    def fail(self) -> None:
        """Ends every wait of the step's threads."""
        with self.changed:
            self.failed.set()
            self.changed.notify_all()


class LocalTransport:
    """One rank's end of a local world; `offset` is the first rank of its pipeline."""

    def __init__(self, world: LocalWorld, rank: int, offset: int, copies: PeerCopies | None):
        self.world, self.rank, self.offset, self.copies = world, rank, offset, copies
        self.device = None if copies is None else copies.device
        self.waited = 0.0  # seconds so far

    def expect(self, source: int, channel: Channel) -> None:
        """Queues need no room in advance."""

    def send(self, destination: int, values: Tensors, envelope: Envelope) -> None:
        """Puts a message into the channel's queue."""
        channel = (self.offset + self.rank, self.offset + destination)
        # The receiver gets the tensors themselves: nobody writes to what was sent.
        envelope.check(values)
        ready = made_by_now(values)
        with self.world.changed:
            self.world.channels.setdefault(channel, deque()).append((values, ready))
            self.world.changed.notify_all()

    def release(self, destination: int, count: int) -> None:
        """Nothing is kept of what was sent."""

    def receive(self, source: int) -> Tensors:
        """The next message of the channel, which is waited for."""
        channel = (self.offset + source, self.offset + self.rank)
        with self.world.changed:
            queue = self.world.channels.setdefault(channel, deque())
            self.wait_until(lambda: bool(queue))
            values, ready = queue.popleft()
        return values if self.copies is None else self.copies(values, ready)

    def reduce(self, bucket: Bucket, parts: Sequence[torch.Tensor]) -> "LocalReducing":
        """Adds the parts of a pipeline in rank order, then averages the pipelines in theirs; who
        comes last does so. In one process there is one optimizer, so owners do not matter."""
        with self.world.changed:
            for reduction, part in zip(bucket.reductions, parts, strict=True):
                brought = self.world.parts.setdefault(self.key(reduction), {})
                brought[self.offset + self.rank] = part
                # Who is last does it for all, in the order of ranks and not of arrivals: sums have
                # the same bits in every run.
                if len(brought) == bucket.members:
                    total = _combined(brought, reduction)
                    self.world.reduced[self.key(reduction)] = total, time.perf_counter()
            self.world.changed.notify_all()
        return LocalReducing(self, bucket)

    def unshard(self, ports: Sequence[Port], layouts: Layouts, state: State) -> Beside:
        """No rank of a process is a member of a group: a `LocalPipeline` is not made of those."""
        raise NotImplementedError

    def wait_until(self, there: Callable[[], bool]) -> None:
        """With the lock of what has changed. Raises Aborted if another rank has failed."""
        if not there():
            begun = time.monotonic()
            self.world.changed.wait_for(lambda: there() or self.world.failed.is_set())
            self.waited += time.monotonic() - begun
        if self.world.failed.is_set():
            raise Aborted(f"rank {self.rank} stops: another rank failed")

    def key(self, reduction: Reduction) -> str:
        """What those who reduce together call a gradient."""
        return reduction.name if reduction.replicas > 1 else f"{self.offset}:{reduction.name}"


class LocalReducing:
    """What one rank has brought to a bucket, until all have."""

    def __init__(self, transport: LocalTransport, bucket: Bucket):
        self.transport = transport
        self.names = {reduction.name: transport.key(reduction) for reduction in bucket.reductions}

    @property
    def ended(self) -> float:
        """When the last sum was there."""
        reduced = self.transport.world.reduced
        return max(reduced[key][1] for key in self.names.values())

    def wait(self) -> dict[str, torch.Tensor]:
        """The sums, once all ranks have brought their parts."""
        world, device = self.transport.world, self.transport.device
        with world.changed:
            keys = self.names.values()
            self.transport.wait_until(lambda: all(key in world.reduced for key in keys))
            sums = {name: world.reduced[key][0] for name, key in self.names.items()}
        return sums if device is None else {n: total.to(device) for n, total in sums.items()}


def _combined(parts: Mapping[int, torch.Tensor], reduction: Reduction) -> torch.Tensor:
    ranks = len(reduction.ranks)
    # By the ranks of all replicas: those of a pipeline follow one another.
    ordered = [parts[rank] for rank in sorted(parts)]
    ordered = [part.to(ordered[0].device) for part in ordered]
    sums = [add(ordered[start : start + ranks]) for start in range(0, len(ordered), ranks)]
    return mean(sums) if reduction.average else add(sums)


class LocalPipeline(Pipeline["LocalStep"]):
    """A program and its lowered schedule, run by one thread a rank in this process.

    `devices` gives every rank a device; without them everything stays where it is. `bodies` has
    compiled bodies by call nodes (`pfeife.compilers.compile_bodies`); other calls run as graphs.
    """

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        devices: Sequence[torch.device] | None = None,
        bodies: Mapping[str, Callable] | None = None,
    ):
        ranks = len(schedule.ranks)
        if devices is not None and len(devices) != ranks:
            raise ValueError(f"{len(devices)} devices for {ranks} ranks")
        if program.members > 1:
            raise ValueError(
                f"the program is that of one of {program.members} members of a group: run it on "
                f"{program.members * ranks} ranks, or by pfeife.evaluate"
            )
        super().__init__(program, schedule)
        program = self.program
        if program.replicas > 1:  # they share bodies
            _torch.write(program.module)
        self.devices: Sequence[torch.device | None] = devices or [None] * ranks
        self.copies = [None if device is None else PeerCopies(device) for device in self.devices]
        arrivals = acknowledged(schedule)
        self.runners = [RankRunner(program, schedule, r, bodies, arrivals) for r in range(ranks)]
        self.gradients = frozenset().union(*(trained_on(program, r) for r in range(ranks)))
        self.threads = Threads([*range(ranks)] * program.replicas)

    def _starting(self) -> contextlib.AbstractContextManager[range]:
        return contextlib.nullcontext(range(self.program.replicas))

    def _started(self, state: State, parts: Sequence[Part]) -> "LocalStep":
        return LocalStep(self, state, parts)


class LocalStep(PipelineStep):
    """One step of a `LocalPipeline`, which may be run phase by phase, each once.

    After a failure it has no results: to ask for them raises.
    """

    def __init__(self, pipeline: LocalPipeline, state: State, parts: Sequence[Part]):
        self.world = LocalWorld()
        self.program = pipeline.program
        self.phases, self.threads = PhaseGuard(pipeline.runners[0].has_phases), pipeline.threads
        self.runners = [
            (runner, self._start(runner, replica, pipeline, state, part))
            for replica, part in enumerate(parts)
            for runner in pipeline.runners
        ]
        self.steps = [step for _, step in self.runners]
        devices = {device for device in pipeline.devices if device is not None}
        self.places = devices or {port.device for port in self.program.ports(Role.PARAMETER)}
        self.worked = [0.0] * len(self.runners)  # seconds of each thread that are not waiting
        self.spent = 0.0

    def _start(
        self, runner: RankRunner, replica: int, pipeline: LocalPipeline, state: State, part: Part
    ) -> Step:
        device = pipeline.devices[runner.rank]
        offset = replica * len(pipeline.runners)
        transport = LocalTransport(self.world, runner.rank, offset, pipeline.copies[runner.rank])
        seeds = {port.name for port in self.program.ports(Role.SEED)}  # which the CPU reads
        reads = runner.handlers.reads - seeds
        inputs = [
            values | moved({n: v for n, v in values.items() if n in reads}, device)
            for values in map(dict, part.inputs)
        ]
        rank_state = {port.fqn: state[port.fqn] for port in runner.state}
        return runner.start(moved(rank_state, device), attrs.evolve(part, inputs=inputs), transport)

    def run(
        self, *, forward: bool = True, backward: bool = True, watch: Watch | None = None
    ) -> None:
        """Runs the forward actions, the backward actions, or all; `watch` sees them. The first
        failure, or an interrupt of this thread, is raised with its own traceback after every
        thread has ended its action. Raises RuntimeError for a phase that has run already."""
        with self.phases.running(forward, backward):
            self._run(forward, backward, watch)

    def _run(self, forward: bool, backward: bool, watch: Watch | None) -> None:
        errors: list[BaseException] = []
        begun = time.monotonic()
        caller = Caller(self.places)

        def work(at: int, runner: RankRunner, step: Step) -> None:
            transport: Any = step.transport
            start_of_work, waited = time.monotonic(), transport.waited
            try:
                border = runner.backward_start
                start, end = (0 if forward else border), (None if backward else border)
                with caller.here(transport.device):
                    runner.run(step, start, end, self._observer(runner.rank, watch))
                seconds = time.monotonic() - start_of_work
                self.worked[at] += seconds - (transport.waited - waited)
            except BaseException as error:
                errors.append(error)
                self.world.fail()

        with self.threads.lent() as threads:
            try:
                pairs = zip(threads, self.runners, strict=True)
                waiting = {
                    thread.submit(work, at, *runner) for at, (thread, runner) in enumerate(pairs)
                }
                while waiting:  # a signal that comes just before a wait is heard after it
                    waiting = wait(waiting, TICK).not_done
            except BaseException:  # such as Ctrl-C, which only the main thread gets
                self.world.fail()
                raise
            # Who was aborted tells of nothing but that another rank has failed.
            if errors:
                raise next((e for e in errors if not isinstance(e, Aborted)), errors[0])
        self.spent += time.monotonic() - begun

    def _observer(self, rank: int, watch: Watch | None) -> Observer:
        """Ends a thread after its action if another one has failed."""
        see, world = watch(rank) if watch else None, self.world

        def observe(action: Action) -> None:
            if see:
                see(action)
            if world.failed.is_set():
                raise Aborted(f"rank {rank} stops: the step has failed")

        return observe

    def compare(self, tangents: Tangents, *, values: bool) -> None:
        """One process has nobody to compare with."""

    def result(self, *, outputs: bool = True) -> Result:
        """The result of all ranks together. Raises RuntimeError for a step that has not run or has
        failed."""
        self.phases.check()
        results = [runner.result(step) for runner, step in self.runners]
        return joined(self.program, results, self.steps[0].sizes)

    @property
    def waiting(self) -> tuple[float, ...]:
        """The seconds in which each thread waited for others; none on GPUs, whose threads are
        ahead."""
        if any(place.type == "cuda" for place in self.places):
            return ()
        return tuple(max(0.0, self.spent - seconds) for seconds in self.worked)

    @property
    def peaks(self) -> tuple[int, ...]:
        """The bytes of each device at its peak so far."""
        return tuple(map(peak_bytes, sorted(self.places, key=str) or [torch.device("cpu")]))
