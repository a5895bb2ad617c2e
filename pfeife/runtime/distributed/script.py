"""Where a rank is in its script: what has changed its state so far, and who reads that just now."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal

import attrs

from pfeife.runtime.failure import Refusal

Change = Literal["calls of compiled steps", "steps of optimizers", "loads of state"]
CHANGES: tuple[Change, ...] = (
    "calls of compiled steps",
    "steps of optimizers",
    "loads of state",
)
_TICK = 0.5  # seconds after which who waits looks whether a rank has failed
_SOON = 0.01  # and whether the script has written what it is waited for


@attrs.frozen
class Place:
    """How often each of `CHANGES` has begun, and has ended, all but calls since the last call, to
    which all ranks come. At the same place of a script ranks have state of the same moment."""

    begun: tuple[int, int, int] = (0, 0, 0)
    ended: tuple[int, int, int] = (0, 0, 0)

    def beyond(self, other: "Place") -> bool:
        """Whether something has begun or ended since."""
        (call, *more), (over, *ended) = self.begun, self.ended
        (its_call, *its_more), (its_over, *its_ended) = other.begun, other.ended
        if (call, over) != (its_call, its_over):
            return (call, over) > (its_call, its_over)
        pairs = zip(more + ended, its_more + its_ended, strict=True)
        return any(one > before for one, before in pairs)

    @property
    def moment(self) -> str:
        """What tells it from the others since the last call."""
        return "-".join(map(str, self.begun[1:]))

    def begins(self, change: Change) -> "Place":
        """The place after a change has begun."""
        if change == CHANGES[0]:
            return Place((self.begun[0] + 1, 0, 0), (self.ended[0], 0, 0))
        return attrs.evolve(self, begun=_more(self.begun, change))

    def ends(self, change: Change) -> "Place":
        """The place after a change has ended."""
        return attrs.evolve(self, ended=_more(self.ended, change))

    def __str__(self) -> str:
        counts = zip(CHANGES, self.begun, self.ended, strict=True)
        return ", ".join(
            f"{count} {name}" + (f" ({ended} of them over)" if ended < count else "")
            for name, count, ended in counts
        )


class Script:
    """This rank's place, and those who read its state: a change waits for them.

    `waiting` is given the rank that the calling thread waits for, and makes what it is in
    meanwhile.
    """

    def __init__(self, waiting: Callable[[int], contextlib.AbstractContextManager[None]]):
        self.place = Place()
        self.waiting = waiting
        self.asked = 0  # how often this rank has asked for state of others at its place
        self.asks = False  # whether it does so now
        self.rests = ""  # where it stays at its place until others come: "its end"
        self.readers: list[int] = []
        self.changed = threading.Condition()

    def begin(self, change: Change) -> None:
        """Before state changes, on the thread that does it; waits for those who read. Raises
        PipelineError if one of them is gone."""
        while not self._begun(change):
            with self.waiting(self.readers[0] if self.readers else 0):
                self._wait(lambda: not self.readers)

    def _begun(self, change: Change) -> bool:
        with self.changed:
            if not self.readers:
                self.place = self.place.begins(change)
                self.asked = 0
                self.changed.notify_all()
            return not self.readers

    def end(self, change: Change) -> None:
        """After what has begun."""
        with self.changed:
            self.place = self.place.ends(change)
            self.changed.notify_all()

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """While this rank asks others for state, until it has got that, or has been refused it."""
        self._ask(True, self.asked)
        try:
            yield
        finally:
            self._ask(False, self.asked + 1)

    def _ask(self, asks: bool, asked: int) -> None:
        with self.changed:
            self.asks, self.asked = asks, asked
            self.changed.notify_all()

    @property
    def stays(self) -> bool:
        """Whether this rank writes nothing by hand just now: it rests, or asks for state itself."""
        return bool(self.rests) or self.asks

    @contextlib.contextmanager
    def resting(self, where: str) -> Iterator[None]:
        """While this rank does not leave its place before the others come."""
        before = self.rests
        self._rest(where)
        try:
            yield
        finally:
            self._rest(before)

    def _rest(self, where: str) -> None:
        with self.changed:
            self.rests = where
            self.changed.notify_all()

    @contextlib.contextmanager
    def reading(
        self,
        reader: int,
        place: Place,
        check: Callable[[], object],
        here: Callable[[], bool] = lambda: True,
    ) -> Iterator[None]:
        """While another rank reads the state that this one has at a place, on another thread than
        the script's; waits until it is there, and `here` says so too. Raises Refusal if it does not
        come there, and what `check`, called from time to time, and `here` do."""
        with self.changed:
            while self.place != place or not here():
                away = self.place != place
                if away and (self.rests or self.place.beyond(place)):
                    raise Refusal(self._elsewhere(place, reader))
                check()
                self.changed.wait(_TICK if away else _SOON)
            self.readers.append(reader)
        try:
            yield
        finally:
            with self.changed:
                self.readers.remove(reader)
                self.changed.notify_all()

    def _elsewhere(self, place: Place, reader: int) -> str:
        return f"there have been {self.place} by now, and on rank {reader}, which asks, {place}"

    def wait_until_asked(
        self, place: Place, times: int, seconds: float, check: Callable[[], object]
    ) -> None:
        """Until this rank has asked as often at a place, has gone on from there, or rests; not
        longer than so many seconds."""

        def over() -> bool:
            check()
            here = self.place == place and self.asked >= times
            return here or bool(self.rests) or self.place.beyond(place)

        self._wait(over, seconds)

    def _wait(self, over: Callable[[], bool], seconds: float | None = None) -> None:
        """Until something is so, or the time is up."""
        end = math.inf if seconds is None else time.monotonic() + seconds
        with self.changed:
            while not over() and time.monotonic() < end:
                self.changed.wait(_TICK)


def _more(counts: tuple[int, int, int], change: Change) -> tuple[int, int, int]:
    at = CHANGES.index(change)
    calls, steps, loads = (count + (at == index) for index, count in enumerate(counts))
    return calls, steps, loads
