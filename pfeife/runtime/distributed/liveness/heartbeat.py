"""What the ranks tell one another beside their messages: that they live, what they do, what failed.

It goes over the store of torch.distributed's process group, on a thread of its own.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from typing import TypeVar

import attrs
from torch import distributed as dist

from pfeife.data import plain
from pfeife.runtime.failure import Failure
from pfeife.runtime.threads import started

INTERVAL = 0.5  # seconds between two signs of life
ANSWER = 5.0  # seconds in which the store answers, unless it is lost
MISSED = 3  # signs of life in a row that the store refuses before it counts as gone
ALL = -1  # who a rank waits for in an operation of all ranks
OUTSIDE = "the program outside of a step"
ENDED = "the end of its program"
COLLECTIVE = "a collective of the script's own: "  # how it starts where a script waits in one
BUILDING = "building: "  # how it starts where a rank prepares something
T = TypeVar("T")


@attrs.frozen
class Activity:
    """What a rank is at, and which rank it waits for, or `ALL`, since when (time.monotonic), which
    nobody knows of a collective of the script's own: that is told from the next one by its call."""

    text: str
    waits_for: int | None = None
    since: float | None = None
    call: object = None


@attrs.frozen
class Heartbeat:
    """A sign of life: the `count`th one of a rank that has been at something for `seconds`."""

    count: int
    doing: str
    seconds: float
    waits_for: int | None = None


Heartbeats = Mapping[int, Heartbeat]  # the last sign of life of each rank


@attrs.frozen
class _Pulse:
    """How far a rank's signs of life have come: how many there were, what it was at in the last
    one, since when, and how many have been refused since the last one that the store has taken."""

    count: int
    doing: Activity
    since: float
    missed: int = 0


class Monitor:
    """One rank's end. All that uses the store runs on its thread, so nobody waits for a store
    that has stopped to answer.

    `look` says what the rank does; `hear` is called once, on a thread, with the first failure
    that any rank has announced. That the store is gone is a failure too.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        look: Callable[[], Activity],
        hear: Callable[[Failure], None],
    ):
        self.store, self.rank, self.size = store, rank, size
        self.look, self.hear = look, hear
        self.failure: Failure | None = None
        # Events, since several threads wait for answers and one gives them.
        self.mute = threading.Event()  # while the store owes an answer for too long
        self.gone = threading.Event()  # once the store is gone: it does not come back
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = started("heartbeat", self._run)

    def end(self) -> None:
        """Stops the thread, unless it waits for a store that does not answer."""
        self.jobs.put(None)
        if not self.mute.is_set():
            self.thread.join(ANSWER)

    def announce(self, failure: Failure) -> Failure:
        """Tells all ranks; returns the first failure that any of them has announced."""

        def publish() -> Failure:
            # The store keeps the first failure, and gives that to whoever announces a later one.
            first = self.store.compare_set("failure", "", plain.to_json(failure))
            return plain.from_json(Failure, first.decode())

        return self._first(self.ask(publish) or failure) or failure

    def heard(self, seconds: float) -> Failure | None:
        """The failure that was announced by any rank, within so many seconds from now."""
        end = time.monotonic() + seconds
        while self._first(self.failure or self.ask(self._published)) is None:
            if time.monotonic() >= end:
                break
            time.sleep(0.05)
        return self.failure

    def _first(self, failure: Failure | None) -> Failure | None:
        """Notes a failure, if there is one; returns the first one that was noted."""
        self.failure = self.failure or failure
        return self.failure

    def aware(self) -> Collection[int]:
        """The ranks that know of the failure or have left; all if the store is gone."""
        everyone = range(self.size)

        def know() -> list[int]:
            return [rank for rank in everyone if self.store.check([f"heard {rank}"])]

        ranks = self.ask(know)
        return everyone if ranks is None else {self.rank, *ranks}

    def heartbeats(self) -> Heartbeats | None:
        """The last signs of life; None if the store does not answer."""
        return self.ask(self._heartbeats)

    def ask(self, question: Callable[[], T]) -> T | None:
        """The answer from the thread, None if it cannot be had."""
        # A store that has not answered one question is not asked another one: each would wait.
        answer: Future[T] = Future()
        if self.mute.is_set() or self.gone.is_set():
            return None

        def job() -> None:
            try:
                answer.set_result(question())
            except (RuntimeError, ValueError) as error:  # the store is gone, or holds nonsense
                answer.set_exception(error)

        self.jobs.put(job)
        try:
            return answer.result(ANSWER)
        except Late:
            self.mute.set()
            return None
        except (RuntimeError, ValueError):
            return None

    def _run(self) -> None:
        is_heard, due = False, time.monotonic()
        pulse = _Pulse(0, Activity(""), due)
        while True:
            try:  # questions may come one upon another: signs of life go on
                job = self.jobs.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                due = time.monotonic() + INTERVAL
                pulse = self._round(pulse)
            else:
                if job is None:
                    return
                job()
            # The store has answered, whatever it was: who was told that it is mute may ask again.
            self.mute.clear()
            if self.failure is not None and not is_heard:
                is_heard = True
                started("failure", self.hear, self.failure)

    def _round(self, last: _Pulse) -> _Pulse:
        """Gives a sign of life, and looks for a failure, unless the store is gone."""
        if self.gone.is_set():
            return last
        try:
            return self._send(last)
        except RuntimeError:  # the store is lost
            if last.missed + 1 == MISSED:
                self.gone.set()
                self._first(store_gone())
            return attrs.evolve(last, missed=last.missed + 1)

    def _send(self, last: _Pulse) -> _Pulse:
        doing, now = self.look(), time.monotonic()
        # The age of an activity is told, not its start: the clocks of nodes differ.
        since = last.since if doing == last.doing else now
        beat = Heartbeat(last.count + 1, doing.text, now - since, doing.waits_for)
        self.store.set(f"heartbeat {self.rank}", plain.to_json(beat))
        if self._first(self.failure or self._published()):
            self.acknowledge()
        return _Pulse(beat.count, doing, since)

    def acknowledge(self) -> None:
        """Says, on the thread, that this rank knows of the failure, or that it needs not to."""
        self.store.set(f"heard {self.rank}", "")

    def _published(self) -> Failure | None:
        if not self.store.check(["failure"]):
            return None
        return plain.from_json(Failure, self.store.get("failure").decode())

    def _heartbeats(self) -> Heartbeats:
        keys = {rank: f"heartbeat {rank}" for rank in range(self.size)}
        there = {rank: key for rank, key in keys.items() if self.store.check([key])}
        return {
            rank: plain.from_json(Heartbeat, self.store.get(key).decode())
            for rank, key in there.items()
        }


def kept_by_torchrun() -> bool:
    """Whether torchrun keeps the store, which else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_gone() -> Failure:
    """The failure of the process that keeps the store."""
    if kept_by_torchrun():
        return Failure(None, "", "torchrun, which keeps the store of the process group, is gone")
    return Failure(0, "", "its process is gone, and with it the store of the process group")
