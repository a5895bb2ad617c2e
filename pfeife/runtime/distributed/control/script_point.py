"""Where a rank is in its script, and whether it rests there."""

import contextlib
import enum
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Literal, get_args

import attrs
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from pfeife import _torch
from pfeife.runtime.distributed.liveness.heartbeat import ALL, COLLECTIVE, OUTSIDE, Activity

Change = Literal["calls of compiled steps", "backwards", "steps of optimizers", "loads of state"]
CHANGES: tuple[Change, ...] = get_args(Change)


@attrs.frozen
class Place:
    """How often each of `CHANGES` has begun and ended, which counts as two: an odd number is under
    way. All but calls are counted since the last call, to which all ranks come."""

    counts: tuple[int, ...] = (0,) * len(CHANGES)

    def beyond(self, other: "Place") -> bool:
        """Whether something has begun or ended since."""
        # A call begins all other counts anew, so it decides first.
        calls, other_calls = self.counts[0], other.counts[0]
        if calls != other_calls:
            return calls > other_calls
        return any(count > before for count, before in zip(self.counts, other.counts, strict=True))

    def after(self, change: Change) -> "Place":
        """The place after a change has begun, or has ended."""
        index = CHANGES.index(change)
        counts = (count + (at == index) for at, count in enumerate(self.counts))
        return Place((self.counts[0] + 1, *Place().counts[1:])) if index == 0 else Place((*counts,))

    def times(self, change: Change) -> int:
        """How often a change has begun."""
        return (self.counts[CHANGES.index(change)] + 1) // 2

    def __str__(self) -> str:
        texts = (
            f"{self.times(change)} {change}" + " (the last is not over)" * (count % 2)
            for change, count in zip(CHANGES, self.counts, strict=True)
        )
        return ", ".join(texts)


@attrs.frozen
class Point:
    """How far a script has come: its place; and between two changes, how many operations of all
    ranks Pfeife has begun, how many collectives the default process group has, and how often the
    script has asked for state, which counts as two as soon as it has an answer; and how often since
    the last change it has written `by_data` to what it asks for (each number but zero)."""

    place: Place
    operations: int = 0
    collectives: int = 0
    questions: int = 0
    by_data: tuple[int, ...] = ()


class Rest(enum.Enum):
    """Where the thread of a script rests: it does not leave before `Script.lock` is free."""

    NOWHERE = "nowhere"
    OPERATION = "an operation of all ranks"
    ASKING = "its own state_dict()"
    END = "its end"


@attrs.frozen
class ScriptCollective:
    """A call of torch.distributed that a thread is in: its innermost frame, and how many
    collectives the default process group has begun, this one among them if it is one of those.

    Two are equal if the thread has not left the call in between. The frame is kept alive, so that
    no other one can be it; torch's functions call none of the script's from there."""

    frame: FrameType = attrs.field(eq=id)
    begun: int = attrs.field(eq=False)

    @property
    def name(self) -> str:
        """That of the function."""
        return f"torch.distributed.{self.frame.f_code.co_name}"

    def writes_to(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether its arguments share memory with any of some tensors."""
        values = pytree.tree_leaves(list(self.frame.f_locals.values()))
        arguments = {_torch.storage_of(v) for v in values if isinstance(v, torch.Tensor)} - {None}
        return any(_torch.storage_of(tensor) in arguments for tensor in tensors)


def collective_of(thread: int) -> ScriptCollective | None:
    """The collective that a thread is in, None if it is elsewhere. Only the functions that wait for
    other ranks count, not what else stands in torch.distributed: that may run parts of scripts."""
    # Nothing of the script is changed for it: no wrapper stands around torch.distributed.
    frame = sys._current_frames().get(thread)
    if frame is None or frame.f_code.co_filename != dist.distributed_c10d.__file__:
        return None
    return ScriptCollective(frame, collectives_begun())


def collectives_begun() -> int:
    """How many collectives the default process group has begun, those that are over among them. A
    message between two ranks counts on these alone."""
    return _torch.sequence_of(dist.group.WORLD) if dist.is_initialized() else 0


@attrs.frozen
class Now:
    """Where a script is: see `Point`; where it rests, and what its GPU had been told to do by its
    last change or rest."""

    place: Place = Place()
    operations: int = 0
    questions: int = 0
    rest: Rest = Rest.NOWHERE
    queued: Any = None


class Script:
    """This rank's script, which runs on one thread. Whoever reads its state holds the `lock`
    meanwhile: changes, and what ends a rest, wait for it. `queue` gives what a GPU has been told to
    do by now."""

    def __init__(self, queue: Callable[[], Any] = lambda: None) -> None:
        self.queue = queue
        self.thread = threading.get_ident()
        self.now = Now(queued=queue())
        self.lock = threading.Condition()

    def _is(self, **changes: Any) -> None:
        """Notes where the script is from now on, with the lock."""
        self.now = attrs.evolve(self.now, **changes)
        self.lock.notify_all()

    def point(self, by_data: tuple[int, ...]) -> Point:
        """Where it is, having written `by_data`."""
        now = self.now
        return Point(now.place, now.operations, collectives_begun(), now.questions, by_data)

    def move(self, change: Change) -> None:
        """When a change begins or ends, on the thread that does it."""
        with self.lock:
            self._is(place=self.now.place.after(change), questions=0, queued=self.queue())

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """While it asks for state, until it has got that, or has been refused it."""
        self._ask()
        try:
            with self.resting(Rest.ASKING):
                yield
        finally:
            self._ask()

    def _ask(self) -> None:
        with self.lock:
            self._is(questions=self.now.questions + 1)

    @contextlib.contextmanager
    def resting(self, where: Rest, *, operation: bool = False) -> Iterator[None]:
        """While the script rests, if this is its thread; in an `operation` of all ranks it may be,
        which then counts."""
        if threading.get_ident() != self.thread:
            yield
            return
        # A rest inside of a rest, as an operation of all ranks at the end, leads back to the outer.
        before = self.now.rest
        self._rest(where, operation)
        try:
            yield
        finally:
            self._rest(before)

    def _rest(self, where: Rest, operation: bool = False) -> None:
        with self.lock:
            operations = self.now.operations + operation
            self._is(rest=where, operations=operations, queued=self.queue())

    def doing(self) -> Activity:
        """What it does outside of steps, as far as others can tell."""
        inside = collective_of(self.thread)
        if inside is None:
            return Activity(OUTSIDE)
        return Activity(f"{COLLECTIVE}{inside.name}", ALL, call=inside)

    def waits_beyond(self, point: Point, inside: ScriptCollective | None) -> bool:
        """Whether this script, which rests, or is `inside` of a collective of its own, has done all
        that one at `point` has: it waits where that one has not come to yet.

            rank 0, which asks     this rank
            barrier (1)            barrier (1)      it has not come out of it: it may be before
            p.data.mul_(.9)        p.data.mul_(.9)
            state_dict()           barrier (2)      it waits here
        """
        match self.now.rest:
            case Rest.END:
                return True
            case Rest.OPERATION:
                return self.now.operations == point.operations + 1
            case Rest.ASKING:
                return False
        # It has begun one collective more than who asks: it cannot get out before that one comes.
        return inside is not None and inside.begun == point.collectives + 1
