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
    nobody knows of the `number`th collective of a script's own."""

    text: str
    waits_for: int | None = None
    since: float | None = None
    number: int = 0


@attrs.frozen
class Heartbeat:
    """A sign of life: the `count`th one of a rank that has been at something for `seconds`."""

    count: int
    doing: str
    seconds: float
    waits_for: int | None = None


Heartbeats = Mapping[int, Heartbeat]  # the last sign of life of each rank


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
        self.mute = False  # whether the store owes an answer for too long
        self.missed = 0  # signs of life since the last one that the store has taken
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.count, self.doing, self.since = 0, Activity(""), time.monotonic()
        self.thread = threading.Thread(target=self._run, name="pfeife heartbeat", daemon=True)
        self.thread.start()

    @property
    def gone(self) -> bool:
        """Whether the store is gone. It does not come back."""
        return self.missed >= MISSED

    def end(self) -> None:
        """Stops the thread, unless it waits for a store that does not answer."""
        self.jobs.put(None)
        if not self.mute:
            self.thread.join(ANSWER)

    def announce(self, failure: Failure) -> Failure:
        """Tells all ranks; returns the first failure that any of them has announced."""

        def publish() -> Failure:
            # The store keeps the first failure, and gives that to whoever announces a later one.
            first = self.store.compare_set("failure", "", plain.to_json(failure))
            return plain.from_json(Failure, first.decode())

        self.failure = self.ask(publish) or failure
        return self.failure

    def heard(self, seconds: float) -> Failure | None:
        """The failure that was announced by any rank, within so many seconds from now."""
        end = time.monotonic() + seconds
        while self.failure is None and time.monotonic() < end:
            self.failure = self.ask(self._published)
            if self.failure is None:
                time.sleep(0.05)
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
        answer: Future[T] = Future()
        if self.mute or self.gone:
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
            self.mute = True
            return None
        except (RuntimeError, ValueError):
            return None

    def _run(self) -> None:
        is_heard, due = False, time.monotonic()
        while True:
            try:  # questions may come one upon another: signs of life go on
                job = self.jobs.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                job, due = self._round, time.monotonic() + INTERVAL
            if job is None:
                return
            job()
            self.mute = False
            if self.failure is not None and not is_heard:
                is_heard = True
                threading.Thread(target=self.hear, args=(self.failure,), daemon=True).start()

    def _round(self) -> None:
        if self.gone:
            return
        try:
            self._send()
            self.missed = 0
        except RuntimeError:  # the store is lost
            self.missed += 1
            if self.gone:
                self.failure = self.failure or store_gone()

    def _send(self) -> None:
        doing = self.look()
        if doing != self.doing:
            self.doing, self.since = doing, time.monotonic()
        self.count += 1
        seconds = time.monotonic() - self.since
        beat = Heartbeat(self.count, doing.text, seconds, doing.waits_for)
        self.store.set(f"heartbeat {self.rank}", plain.to_json(beat))
        self.failure = self.failure or self._published()
        if self.failure is not None:
            self.acknowledge()

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
