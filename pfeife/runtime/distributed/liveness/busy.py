"""What a rank is at, which other ranks may wait for, and for whom it waits itself.

step(batch)                 busy: "the inputs of a step"
                            busy: "action 0F0 (...)"
  a message of rank 1         waiting for 1, inside of that      <- what the other threads see
"""

import contextlib
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import attrs

from pfeife.runtime.distributed.liveness.heartbeat import ALL, BUILDING, OUTSIDE, Activity
from pfeife.runtime.failure import CollectiveError, PipelineError


class Busy(ABC):
    """What a rank is at: a stack, the innermost last. The threads that look after the rank read its
    end, and never find it empty; `waited` are the seconds that the rank has waited so far, for
    messages and for all ranks. Outside of all this it runs its script, which `doing` tells of."""

    def __init__(self, doing: Callable[[], Activity]) -> None:
        self.doing = doing
        self.looks: list[Callable[[], Activity]] = [_outside]
        self.waited = 0.0

    @abstractmethod
    def check(self) -> None:
        """Raises PipelineError if any rank has failed."""

    @abstractmethod
    def failed(self, error: BaseException, where: str) -> None:
        """Stops all ranks, since this one has raised an exception."""

    @abstractmethod
    def lost(self, peer: int | None, error: RuntimeError) -> PipelineError:
        """The error to raise when a message from or to a rank of the world (None if it is not
        known which) has failed."""

    @property
    def inside(self) -> bool:
        """Whether a thread is at something that other ranks may wait for."""
        return len(self.looks) > 1

    def look(self) -> Activity:
        """What this rank is at. Other threads ask."""
        doing = self.looks[-1]()
        return self.doing() if doing == _outside() else doing

    @contextlib.contextmanager
    def at(self, look: Callable[[], Activity]) -> Iterator[None]:
        """While the calling thread is at what `look` tells."""
        self.looks.append(look)
        try:
            yield
        finally:
            # Not the last one: another thread may have come in between.
            self.looks.remove(look)

    @contextlib.contextmanager
    def waiting(self, rank: int) -> Iterator[None]:
        """While the calling thread waits for a rank of the world, or for `ALL`. Raises as
        `reaching`."""
        # What is outside goes on being asked: its text may tell more by then.
        since, outer = time.monotonic(), self.looks[-1]
        waits = functools.partial(_waiting, outer, rank, since)
        try:
            with self.at(waits), self.reaching(None if rank == ALL else rank):
                yield
        finally:
            self.waited += time.monotonic() - since

    @contextlib.contextmanager
    def reaching(self, rank: int | None) -> Iterator[None]:
        """While messages go from or to a rank of the world, None for one that is not known. Raises
        PipelineError, which says why, where one fails."""
        try:
            yield
        except PipelineError:
            raise
        except RuntimeError as error:
            raise self.lost(rank, error) from error

    @contextlib.contextmanager
    def busy(self, look: Callable[[], Activity]) -> Iterator[None]:
        """While the calling thread is at something that other ranks may wait for.

        Raises PipelineError if a rank has failed already. An exception inside fails all ranks.
        """
        self.check()
        with self.at(look):
            try:
                yield
            except (PipelineError, CollectiveError):
                raise
            except BaseException as error:
                self.failed(error, look().text)
                raise

    def building(self, what: str) -> contextlib.AbstractContextManager[None]:
        """While this rank prepares something, which may take longer than the timeout."""
        return self.busy(lambda: Activity(BUILDING + what))


def _outside() -> Activity:
    return Activity(OUTSIDE)


def _waiting(outer: Callable[[], Activity], rank: int, since: float) -> Activity:
    """What a rank is at that waits for another one inside of something."""
    return attrs.evolve(outer(), waits_for=rank, since=since)
