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
from pfeife.runtime.failure import Failure, PipelineError

BEAT = 0.5  # seconds between two signs of life
ANSWER = 5.0  # seconds in which the store answers, unless it is lost
MISSED = 3  # signs of life in a row that the store refuses before it counts as gone
ALL = -1  # who a rank waits for in an operation of all ranks
OUTSIDE = "the program outside of a step"
BUILDING = "building: "  # how it begins where a rank prepares something
T = TypeVar("T")


@attrs.frozen
class Doing:
    """What a rank is at, and which rank it waits for, or `ALL`, since when (time.monotonic)."""

    text: str
    waits_for: int | None = None
    since: float | None = None


@attrs.frozen
class Beat:
    """A sign of life: the `count`th one of a rank that has been at something for `seconds`."""

    count: int
    doing: str
    seconds: float
    waits_for: int | None = None


Beats = Mapping[int, Beat]  # the last sign of life of each rank


class Lifeline:
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
        look: Callable[[], Doing],
        hear: Callable[[Failure], None],
    ):
        self.store, self.rank, self.size = store, rank, size
        self.look, self.hear = look, hear
        self.failure: Failure | None = None
        self.mute = False  # whether the store owes an answer for too long
        self.missed = 0  # signs of life since the last one that the store has taken
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.count, self.doing, self.since = 0, Doing(""), time.monotonic()
        self.thread = threading.Thread(target=self._run, name="pfeife lifeline", daemon=True)
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

    def told(self) -> Collection[int]:
        """The ranks that know of the failure or have left; all if the store is gone."""
        everyone = range(self.size)

        def know() -> list[int]:
            return [rank for rank in everyone if self.store.check([f"heard {rank}"])]

        found = self.ask(know)
        return everyone if found is None else {self.rank, *found}

    def beats(self) -> Beats | None:
        """The last signs of life; None if the store does not answer."""
        return self.ask(self._beats)

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
        told, due = False, time.monotonic()
        while True:
            try:  # questions may come one upon another: signs of life go on
                job = self.jobs.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                job, due = self._round, time.monotonic() + BEAT
            if job is None:
                return
            job()
            self.mute = False
            if self.failure is not None and not told:
                told = True
                threading.Thread(target=self.hear, args=(self.failure,), daemon=True).start()

    def _round(self) -> None:
        if self.gone:
            return
        try:
            self._beat()
            self.missed = 0
        except RuntimeError:  # the store is lost
            self.missed += 1
            if self.gone:
                self.failure = self.failure or store_gone()

    def _beat(self) -> None:
        doing = self.look()
        if doing != self.doing:
            self.doing, self.since = doing, time.monotonic()
        self.count += 1
        seconds = time.monotonic() - self.since
        beat = Beat(self.count, doing.text, seconds, doing.waits_for)
        self.store.set(f"beat {self.rank}", plain.to_json(beat))
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

    def _beats(self) -> Beats:
        keys = {rank: f"beat {rank}" for rank in range(self.size)}
        there = {rank: key for rank, key in keys.items() if self.store.check([key])}
        return {
            rank: plain.from_json(Beat, self.store.get(key).decode()) for rank, key in there.items()
        }


def roll_call(
    store: dist.Store, rank: int, size: int, timeout: float, first: int = 0
) -> tuple[int, list[int]]:
    """Waits until all ranks are here. Returns the number of the round (`first` or later) in which
    they have met, and the ranks that were missing after `timeout` seconds or have left their
    program: none, or all ranks that came are told the same.

    A round is over for all when one rank has given it up, and who comes later waits in the next:
    so nobody goes on with a rank that has turned away.
    """
    number = first
    while True:
        found = _round(store, number, rank, size, timeout)
        if found is None or rank in found:
            number += 1
        else:
            return number, found


def _round(
    store: dist.Store, number: int, rank: int, size: int, timeout: float
) -> list[int] | None:
    """The missing ranks of a round, None if it was over before this rank came."""
    verdict = f"round {number}"
    if store.check([verdict]):
        return None
    store.set(f"here {number} {rank}", "")
    missing = set(range(size)) - {rank}
    deadline, pause = time.monotonic() + timeout, 0.001
    while not store.check([verdict]):
        missing = {one for one in missing if not store.check([f"here {number} {one}"])}
        gone = any(store.check([f"left {one}"]) for one in missing)
        if not missing or gone or time.monotonic() >= deadline:
            text = plain.to_json(tuple(sorted(missing)))
            store.compare_set(verdict, "", text)
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return list(plain.from_json(tuple[int, ...], store.get(verdict).decode()))


def met(store: dist.Store, rank: int, size: int, timeout: float, first: int = 0) -> int:
    """The round in which all ranks have met; raises PipelineError if some are missing."""
    number, missing = roll_call(store, rank, size, timeout, first)
    if not missing:
        return number
    which = f"ranks {missing} of {size} are" if len(missing) > 1 else f"of {size} ranks it is"
    cause = f"it has not arrived: {which} missing (timeout={timeout:g})"
    raise PipelineError(Failure(missing[0], "", cause))


def kept_by_torchrun() -> bool:
    """Whether torchrun keeps the store, which else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_gone() -> Failure:
    """The failure of the process that keeps the store."""
    if kept_by_torchrun():
        return Failure(None, "", "torchrun, which keeps the store of the process group, is gone")
    return Failure(0, "", "its process is gone, and with it the store of the process group")
