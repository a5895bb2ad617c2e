"""Who waits for whom on GPUs that are not there: a vector clock for the host and every stream.

    with Recorder() as recorder:      # torch.cuda's streams and events are its own from here on
        state = recorder.on("cuda:0", state)
        pipeline(state, microbatches)
    assert not recorder.found

The tensors are fake ones on CUDA devices, so what runs is what runs on GPUs, but for the kernels.
What a device is given, its stream's clock counts; an event is a copy of that clock, and who waits
for it takes it into its own (Lamport; Fidge and Mattern). An access to a memory that is not after
those that it depends on is a race; so is a memory that goes back to its stream, which may use it
again at once, before another stream is through with it (`record_stream` says that it must wait).

A stream is of a pool, as in torch: one that is asked for may be in use by others. Copies from one
GPU to another are as in torch too: on the source's stream, between two waits for the other's.
What the host has waited for, all threads take to be done: their locks are not followed.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pfeife._torch import FakeTensorMode

Clock = dict[str, int]


class Event:
    """What a stream had been given when it was recorded."""

    def __init__(self, recorder: "Recorder"):
        self.recorder, self.clock = recorder, Clock()
        self.device: torch.device | None = None

    def record(self, stream: "Stream | None" = None) -> None:
        stream = stream or self.recorder.current()
        self.clock, self.device = dict(stream.clock), stream.device

    def query(self) -> bool:
        """Nothing is over unless somebody waits for it."""
        return False

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or self.recorder.current()).wait_event(self)

    def synchronize(self) -> None:
        self.recorder.host.wait_event(self)


class Stream:
    """A queue of one device, or the host."""

    def __init__(self, recorder: "Recorder", device: torch.device, name: str):
        self.recorder, self.device, self.name = recorder, device, name
        self.clock: Clock = {name: 0}

    def wait_event(self, event: Event) -> None:
        with self.recorder.looking():
            self.take(event.clock)

    def wait_stream(self, other: "Stream") -> None:
        with self.recorder.looking():
            self.take(other.clock)

    def record_event(self, event: Event | None = None) -> Event:
        with self.recorder.looking():
            event = event or Event(self.recorder)
            event.record(self)
            return event

    def synchronize(self) -> None:
        self.recorder.host.wait_stream(self)

    def take(self, clock: Clock) -> None:
        for name, count in clock.items():
            self.clock[name] = max(count, self.clock.get(name, 0))

    def tick(self) -> int:
        self.clock[self.name] += 1
        return self.clock[self.name]


class Memory:
    """A storage: its stream, and when each stream last read and wrote it, with by what."""

    def __init__(self, storage: StorageWeakRef, owner: Stream):
        self.storage, self.owner = storage, owner
        self.reads: dict[str, tuple[int, str]] = {}
        self.writes: dict[str, tuple[int, str]] = {}
        self.recorded: set[Stream] = set()

    def not_before(self, clock: Clock, *, reads: bool) -> Iterator[str]:
        """The accesses that a clock does not know to be over."""
        for kind, accesses in (("write", self.writes), ("read", self.reads if reads else {})):
            for name, (count, by) in accesses.items():
                if clock.get(name, 0) < count:
                    yield f"its {kind} by {by}"


class Recorder:
    """Stands in for torch.cuda's streams and events; notes races in `found`.

    `pool` is how many streams of a device there are beside its default one.
    """

    def __init__(self, pool: int = 32):
        self.pool, self.lock, self.thread = pool, threading.RLock(), threading.local()
        self.found: list[str] = []
        self.copies = 0  # between GPUs
        self.taken = 0  # streams that were asked for
        self.streams: dict[torch.device, list[Stream]] = {}
        self.asked: dict[torch.device, Iterator[Stream]] = {}
        self.memories: dict[int, Memory] = {}
        self.host = Stream(self, torch.device("cpu"), "the host")
        self.fakes = _Fakes()
        self.entered = contextlib.ExitStack()

    def __enter__(self) -> "Recorder":
        theirs = {
            "Stream": self.another,
            "Event": lambda **_: Event(self),
            "current_stream": self.current,
            "stream": self.on_stream,
            "synchronize": lambda device=None: self.current(device).synchronize(),
        }
        for name, ours in theirs.items():
            self.entered.enter_context(mock.patch.object(torch.cuda, name, ours))
        keep = self.keep
        kept = mock.patch.object(
            torch.Tensor, "record_stream", lambda value, stream: keep(value, stream)
        )
        self.entered.enter_context(kept)
        self.entered.enter_context(self.watched())
        return self

    def __exit__(self, *error: Any) -> None:
        self.entered.close()

    def on(self, device: str, values: Any) -> Any:
        """Tensors of the CPU, as fake ones of a device."""
        return pytree.tree_map_only(
            torch.Tensor, lambda one: self.fakes.from_tensor(one.detach()).to(device), values
        )

    def of(self, device: torch.device) -> list[Stream]:
        """The default stream and the pool."""
        if device not in self.streams:
            names = [f"{device}'s default stream", *(f"{device}'s {n}" for n in range(self.pool))]
            self.streams[device] = [Stream(self, device, name) for name in names]
            self.asked[device] = itertools.cycle(self.streams[device][1:])
        return self.streams[device]

    def another(self, device: torch.device) -> Stream:
        with self.lock:
            self.of(device)
            self.taken += 1
            return next(self.asked[device])

    def current(self, device: torch.device | None = None) -> Stream:
        mine: dict[Any, Any] = self.thread.__dict__.setdefault("current", {})
        device = device or mine.get("device", torch.device("cuda:0"))
        with self.lock:
            return mine.get(device) or self.of(torch.device(device))[0]

    @contextlib.contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        mine: dict[Any, Any] = self.thread.__dict__.setdefault("current", {})
        before = dict(mine)
        mine |= {stream.device: stream, "device": stream.device}
        with self.watched():
            yield
        mine.clear()
        mine |= before

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """What this thread does is seen, once."""
        if getattr(self.thread, "seen", False):
            yield
            return
        self.thread.seen = True
        try:
            with self.fakes, _Watch(self), _NoDevice():
                yield
        finally:
            self.thread.seen = False

    def keep(self, value: torch.Tensor, stream: Stream) -> None:
        with self.looking():
            self.memory(value, stream).recorded.add(stream)

    def memory(self, value: torch.Tensor, owner: Stream) -> Memory:
        storage = StorageWeakRef(value.untyped_storage())
        return self.memories.setdefault(storage.cdata, Memory(storage, owner))

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Alone, after what has been freed so far has gone back to its streams."""
        with self.lock:
            for key in [k for k, one in self.memories.items() if one.storage.expired()]:
                self._free(self.memories.pop(key))
            yield

    def _free(self, memory: Memory) -> None:
        waits = Stream(self, memory.owner.device, "the allocator")
        for stream in (memory.owner, *memory.recorded):  # an event on each, which it asks
            waits.take(stream.clock)
        for access in memory.not_before(waits.clock, reads=True):
            self.found.append(f"freed: a memory of {memory.owner.name} before {access} is over")

    def ran(self, operation: Any, given: Any, result: Any) -> None:
        """An operation has been queued, or done by the host."""
        returns = [one.alias_info for one in operation._schema.returns]
        if any(alias is not None and not alias.is_write for alias in returns):
            return  # a view
        written = _written(operation, *given)
        read = [one for one in _tensors(given) if all(one is not other for other in written)]
        made = [one for one in _tensors(result) if not self._knows(one)]
        stream, other = self._streams(read, [*written, *made])
        by = f"{operation} on {stream.name} ({threading.current_thread().name})"
        for before in (self.host, other or stream):
            stream.take(before.clock)
        count = stream.tick()
        for one in read:
            if one.device.type == "cpu" and not _returns_at_once(given):
                self._access(one, self.host, self.host.tick(), by, write=False)
            else:
                self._access(one, stream, count, by, write=False)
        for one in (*written, *made):
            self._access(one, stream, count, by, write=True, owner=other)
        if other is not None and not (other is self.host and _returns_at_once(given)):
            other.take(stream.clock)

    def _knows(self, value: torch.Tensor) -> bool:
        return StorageWeakRef(value.untyped_storage()).cdata in self.memories

    def _streams(self, read: list, written: list) -> tuple[Stream, Stream | None]:
        """The stream that does an operation, and that of the device to which it copies."""
        sources = {one.device for one in read if one.is_cuda}
        goals = {one.device for one in written}
        if not sources and all(goal.type == "cpu" for goal in goals):
            return self.host, None
        if len(sources | goals) == 1:
            return self.current((sources | goals).pop()), None
        if not sources:
            return self.current(goals.pop()), None  # from the host
        (source,) = sources
        away = goals - sources
        if not away:
            return self.current(source), None
        (goal,) = away
        if goal.type == "cpu":
            return self.current(source), self.host
        self.copies += 1
        return self.current(source), self.current(goal)

    def _access(
        self,
        value: torch.Tensor,
        stream: Stream,
        count: int,
        by: str,
        *,
        write: bool,
        owner: Stream | None = None,
    ) -> None:
        if not value.untyped_storage().nbytes():
            return
        memory = self.memory(value, owner or stream)
        for access in memory.not_before(stream.clock, reads=write):
            how = "written" if write else "read"
            self.found.append(f"{how}: by {by} before {access} is over")
        (memory.writes if write else memory.reads)[stream.name] = count, by


class _Fakes(FakeTensorMode):
    """A mode for several threads: whether one is in a kernel, where a tensor's device is another,
    is no matter of the others."""

    def __init__(self) -> None:
        self.thread = threading.local()
        super().__init__(allow_non_fake_inputs=True)

    @property
    def in_kernel_invocation(self) -> bool:
        return getattr(self.thread, "inside", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, inside: bool) -> None:
        self.thread.inside = inside


class _Watch(TorchDispatchMode):
    """Tells a recorder of every operation of a thread."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: tuple[tuple, Mapping] = args, kwargs or {}
        if func.namespace == "prim":  # a question
            return func(*args, **given[1])
        with self.recorder.lock:
            result = func(*args, **given[1])
            with self.recorder.looking():
                self.recorder.ran(func, given, result)
        return result


class _NoDevice(TorchFunctionMode):
    """Brackets and `copy_` of Python ask for a tensor's device first, which is not there; the
    operations that they stand for do not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args, **(kwargs or {}))
        if func == torch.Tensor.__getitem__ and isinstance(args[1], int):
            return args[0].select(0, args[1])
        if func == torch.Tensor.__getitem__ and isinstance(args[1], slice):
            start, end, _ = args[1].indices(len(args[0]))
            return args[0].narrow(0, start, end - start)
        return func(*args, **(kwargs or {}))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(tree) if isinstance(one, torch.Tensor)]


def _written(operation: Any, args: tuple, named: Mapping) -> list[torch.Tensor]:
    arguments = operation._schema.arguments
    given = dict(zip((one.name for one in arguments), args, strict=False)) | dict(named)
    changed = [one.name for one in arguments if one.alias_info and one.alias_info.is_write]
    return _tensors([given.get(name) for name in changed])


def _returns_at_once(given: tuple[tuple, Mapping]) -> bool:
    return bool(given[1].get("non_blocking"))
