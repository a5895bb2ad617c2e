"""Streams that are queues, events, and communicators in which sends and receives meet.

    host  --posts-->  stream  --starts-->  operation  --meets its counterpart in a communicator

An operation starts when the one before it on its stream is done, and, where a GPU has few hardware
queues, when all that was posted to its queue before have started. A message is done when both its
ends have started, a collective when those of all members have. Nothing is buffered. Streams are
first in, first out and nobody asks for whichever comes first, so what can be reached does not
depend on who runs when: one order of the hosts stands for all.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs


class Mismatch(AssertionError):
    """Two ends of a communicator that do not belong together: NCCL hangs there, or corrupts."""


@attrs.define(eq=False)
class Operation:
    """One on a stream; `after` is what it waits for (an event), `meets` what it is to its
    communicator. `where` is what the rank was at when it posted it."""

    what: str
    where: str
    stream: "Stream"
    after: "Operation | None" = None
    meets: "Meets | None" = None
    before: "Operation | None" = None  # on the same stream
    started: bool = False
    done: bool = False
    wakes: "list[deque[Operation]]" = attrs.field(factory=list, repr=False)


@attrs.define(eq=False)
class Half:
    """A send or a receive of bytes, one end of a message."""

    sends: bool
    peer: int  # a rank of the world
    tensor: Any


@attrs.define(eq=False)
class Meets:
    """What an operation is to a communicator: halves of messages (several: a group), or a
    `collective`, done by the last member's `act` on what each has `given`."""

    communicator: "Communicator"
    halves: list[Half] = attrs.field(factory=list)
    collective: str = ""
    given: Any = None
    act: "Callable[[dict[int, Any]], None] | None" = None


class Communicator:
    """Ranks of the world; `joined` are those that have connected, for each kind of operation."""

    def __init__(self, name: str, ranks: Sequence[int]):
        self.name, self.ranks = name, tuple(ranks)
        self.joined: dict[str, set[int]] = {}
        self.streams: dict[int, Stream] = {}
        self.current: dict[int, Operation] = {}  # what has started, and is not done


class Stream:
    """A queue of a rank's GPU, which shares a hardware queue with others where there are few."""

    def __init__(self, gpu: "Gpu", name: str, hardware: "deque[Operation]"):
        self.gpu, self.name, self.hardware = gpu, name, hardware
        self.last: Operation | None = None
        self.posted: list[Operation] = []  # and not done

    def post(
        self, what: str, after: Operation | None = None, meets: Meets | None = None
    ) -> Operation:
        one = Operation(what, self.gpu.where(), self, after, meets, self.last)
        self.last = one
        self.posted.append(one)
        self.hardware.append(one)
        self.gpu.machine.awake.append(self.hardware)
        return one


class Gpu:
    """The streams of a rank; `where` says what its host is at."""

    def __init__(self, machine: "Machine", rank: int, where: Callable[[], str]):
        self.machine, self.rank, self.where = machine, rank, where
        self.hardware: list[deque[Operation]] = []
        self.streams: list[Stream] = []
        self.compute = self.current = self.stream("the compute stream")

    def stream(self, name: str) -> Stream:
        """A new one, on the next hardware queue."""
        queues, at = self.machine.queues, len(self.streams)
        if queues is None or at < queues:
            self.hardware.append(deque())
        found = Stream(self, name, self.hardware[at % len(self.hardware)])
        self.streams.append(found)
        return found


class Machine:
    """All GPUs, each with so many hardware `queues` (None: one for every stream); `blocks` says
    that a host waits for each kernel that it launches."""

    def __init__(self, queues: int | None = None, blocks: bool = False):
        self.queues, self.blocks = queues, blocks
        self.gpus: list[Gpu] = []
        self.awake: deque[deque[Operation]] = deque()  # hardware queues that may go on
        self.operations = 0  # that are done

    def settle(self) -> None:
        """Starts and ends all that can."""
        while self.awake:
            queue = self.awake.popleft()
            while queue:
                one = queue[0]
                missing = next((p for p in (one.before, one.after) if p and not p.done), None)
                if missing is not None:
                    missing.wakes.append(queue)
                    break
                queue.popleft()
                one.started = True
                self._meet(one) if one.meets else self._end(one)

    def _end(self, one: Operation) -> None:
        one.done, one.before, one.after = True, None, None
        one.stream.posted.remove(one)
        self.awake.extend(one.wakes)
        one.wakes.clear()
        self.operations += 1

    def _meet(self, one: Operation) -> None:
        meets = one.meets
        assert meets is not None
        current = meets.communicator.current
        current[one.stream.gpu.rank] = one
        for done in _collected(current, meets) if meets.collective else _matched(current, one):
            del current[done.stream.gpu.rank]
            self._end(done)


def _collected(current: dict[int, Operation], meets: Meets) -> list[Operation]:
    every = [current.get(rank) for rank in meets.communicator.ranks]
    if not all(one and one.meets and one.meets.collective for one in every):
        return []
    if len({one.meets.collective for one in every}) > 1:
        told = "; ".join(_told(one) for one in every)
        raise Mismatch(f"{meets.communicator.name}: its members are at others: {told}")
    assert meets.act is not None
    meets.act({one.stream.gpu.rank: one.meets.given for one in every})
    return every


def _matched(current: dict[int, Operation], one: Operation) -> list[Operation]:
    rank, done = one.stream.gpu.rank, []
    for half in list(one.meets.halves):
        other = current.get(half.peer)
        theirs = other.meets.halves if other else []
        fits = (h for h in theirs if h.peer == rank and h.sends != half.sends)
        if (found := next(fits, None)) is None:
            continue
        source, target = (half, found) if half.sends else (found, half)
        if source.tensor.nbytes != target.tensor.nbytes:
            raise Mismatch(f"{_told(one)} and {_told(other)} are not of one size")
        target.tensor.copy_(source.tensor)
        one.meets.halves.remove(half)
        theirs.remove(found)
        done += [] if theirs else [other]
    return done if one.meets.halves else [*done, one]


def _told(one: Operation) -> str:
    return f"rank {one.stream.gpu.rank} at {one.where}: {one.what}"
