"""What a real step took, in the same data as what was predicted of it: seconds and bytes."""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from pfeife._torch import TorchDispatchMode
from pfeife.data import plain
from pfeife.data.schedule import Action
from pfeife.data.timeline import Event, MemoryCurve, MemoryPoint, Timeline
from pfeife.ir.evaluate import State
from pfeife.ir.messages import holders
from pfeife.ir.microbatch import Counted
from pfeife.ir.parts import Role
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.local.pipeline import LocalPipeline
from pfeife.runtime.step import Observer, Step

T = TypeVar("T")


class Stopwatch:
    """Notes when each action of each rank ends; the next one starts there."""

    def __init__(self, devices: Sequence[torch.device]):
        self.events: list[Event] = []
        self.devices = devices
        self.start = self._now()

    def _now(self) -> float:
        for device in self.devices:
            if device.type == "cuda":  # the work that the action has queued belongs to it
                torch.cuda.synchronize(device)
        return time.perf_counter()

    def __call__(self, rank: int) -> Observer:
        last = 0.0

        def observe(action: Action) -> None:
            nonlocal last
            now = self._now() - self.start
            self.events.append(Event(rank, action, last, now))
            last = now

        return observe

    def with_ends(self, steps: Mapping[int, Step]) -> list[Event]:
        """The events, when the steps of ranks are over: what ran beside others ends when that was
        done."""
        return [
            attrs.evolve(event, end=max(event.end, ended - self.start))
            if (ended := steps[event.rank].ended.get(event.action)) is not None
            else event
            for event in self.events
        ]


def profile(
    pipeline: LocalPipeline | DistributedPipeline,
    state: State,
    microbatches: Sequence[Any],
    **options: Any,
) -> Timeline:
    """Runs one step (arguments as for `evaluate`) and returns when each action ran.

    On CUDA every action is waited for, so that its time is its own; overlap is lost. With a rank
    a process this is collective: all ranks start together and all get the whole timeline of the
    first replica.
    """
    if isinstance(pipeline, LocalPipeline):
        whole = pipeline.start(state, microbatches, **options)
        watch = Stopwatch(list(whole.places))
        whole.run(watch=watch)
        return _ordered(watch.with_ends(dict(enumerate(whole.steps))))
    step = pipeline.start(state, microbatches, **options)
    world = pipeline.transport.world
    world.from_all_ranks("")  # all are here
    watch = Stopwatch([pipeline.device])
    step.run(watch=watch)
    events = watch.with_ends({pipeline.transport.rank: step.steps[0]})
    timelines = _of_replica(pipeline, Timeline(tuple(events)), 0)
    return _ordered([event for timeline in timelines for event in timeline.events])


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all storages that operations of this thread make, while they live, and
    those of Gloo's thread that work for it.

    Those of `existing` tensors are not counted. Gives a point of the curve for every action.
    """

    def __init__(self, existing: Iterable[torch.Tensor], device: torch.device):
        super().__init__()
        self.device = device
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.lock = threading.RLock()
        self.peak = 0
        self.points: list[MemoryPoint] = []
        for tensor in existing:
            self._add(tensor, 0)

    def _add(self, tensor: torch.Tensor, size: int) -> None:
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage.cdata not in self.live:
            self.live[storage.cdata] = (storage, size)

    def _purge(self) -> None:
        for key in [key for key, (storage, _) in self.live.items() if storage.expired()]:
            del self.live[key]

    @property
    def bytes(self) -> int:
        """What lives now."""
        return sum(size for _, size in self.live.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Temporaries inside of one operation are not seen: only what it returns is a storage here.
        result = func(*args, **kwargs or {})
        with self.lock:
            self._purge()
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.device.type == self.device.type:
                    self._add(tensor, tensor.untyped_storage().nbytes())
            self.peak = max(self.peak, self.bytes)
        return result

    def __call__(self, rank: int) -> Observer:
        def observe(action: Action) -> None:
            with self.lock:
                self._purge()
                self.points.append(MemoryPoint(action, self.peak, self.bytes))
                self.peak = self.bytes

        return observe


class CudaMemory:
    """The same from the statistics of torch's CUDA allocator, which rounds."""

    def __init__(self, device: torch.device):
        self.device, self.points = device, list[MemoryPoint]()
        torch.cuda.synchronize(device)
        self.before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

    def __call__(self, rank: int) -> Observer:
        def observe(action: Action) -> None:
            peak = torch.cuda.max_memory_allocated(self.device) - self.before
            now = torch.cuda.memory_allocated(self.device) - self.before
            self.points.append(MemoryPoint(action, peak, now))
            torch.cuda.reset_peak_memory_stats(self.device)

        return observe


def profile_memory(
    pipeline: DistributedPipeline,
    state: State,
    microbatches: Sequence[Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    replica: int = 0,
    **options: Any,
) -> tuple[MemoryCurve, ...]:
    """Runs a step (arguments as for `evaluate`) and returns the bytes that every rank held.

    Collective; the ranks of one replica. A step runs before, which makes what stays. On
    CPUs live tensors are counted, on CUDA the allocator is asked. What the rank's stages hold all
    the time is counted from `state`, the batch and the optimizer's state.
    """
    # The first step makes buffers and compiles; what it leaves is there before the one that counts.
    pipeline(state, microbatches, **options)
    step = pipeline.start(state, microbatches, **options)
    program, rank = pipeline.program, pipeline.transport.rank
    inputs = [
        microbatch.microbatch if isinstance(microbatch, Counted) else microbatch
        for microbatch in microbatches
    ]
    batch = [x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
    held = {"batch": sum(tensor.nbytes for tensor in batch)}
    for role, word in ((Role.PARAMETER, "parameters"), (Role.BUFFER, "buffers")):
        calls_of = holders(program, role)
        names = [name for name, calls in calls_of.items() if any(c.rank == rank for c in calls)]
        held[word] = sum(state[name].nbytes for name in names)
    if optimizer is not None:
        leaves = [x for x in pytree.tree_leaves(list(optimizer.state.values()))]
        held["optimizer"] = sum(x.nbytes for x in leaves if isinstance(x, torch.Tensor))
    buffers = pipeline.transport.buffers.tensors
    held["receive buffers"] = sum(buffer.nbytes for buffer in buffers)
    if pipeline.device.type == "cuda":
        watch = CudaMemory(pipeline.device)
        step.run(watch=watch)
        points = watch.points
    else:
        existing = [
            *buffers,
            *state.values(),
            *(v for values in step.step.values for v in values.values()),
        ]
        with LiveTensors(existing, pipeline.device) as tensors:
            step.run(watch=tensors)
        points = tensors.points
    return tuple(_of_replica(pipeline, MemoryCurve(rank, held, tuple(points)), replica))


def _of_replica(pipeline: DistributedPipeline, value: T, replica: int) -> list[T]:
    """What each rank of a replica has of some data (collective)."""
    texts, mesh = pipeline.transport.world.from_all_ranks(plain.to_json(value)), pipeline.mesh
    ranks = [mesh.in_world(replica, rank) for rank in range(mesh.ranks)]
    return [plain.from_json(type(value), texts[rank]) for rank in ranks]


def _ordered(events: list[Event]) -> Timeline:
    return Timeline(tuple(sorted(events, key=lambda event: (event.start, event.rank))))
