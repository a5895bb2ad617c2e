"""How long a rank waits for others: a thread looks on, and gives up waits that are in vain."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import attrs

from pfeife.runtime.distributed.liveness.diagnosis import Wait
from pfeife.runtime.distributed.liveness.heartbeat import INTERVAL, Activity, Heartbeats, Monitor
from pfeife.runtime.failure import Failure
from pfeife.runtime.threads import started

log = logging.getLogger("pfeife")

WARNING = 60.0  # seconds of waiting before the first warning; each next one comes twice as late


@attrs.define(eq=False)
class WaitWatchdog:
    """Looks on while a rank waits.

    `look` says what the rank does. A wait in which no rank has made progress for `timeout()`
    seconds ends by `stop`, which is given the failure; one for a rank that lives and is busy
    outside of a step goes on, and the logger warns from time to time. `gone` may tell earlier
    that a wait is in vain.
    """

    monitor: Monitor
    timeout: Callable[[], float]
    look: Callable[[], Activity]
    stop: Callable[[Failure], object]
    gone: Callable[[Activity], Failure | None]
    over: threading.Event = attrs.field(init=False, factory=threading.Event)
    thread: threading.Thread = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.thread = started("patience", self._run)

    def end(self) -> None:
        """Stops the thread, unless it waits for a store that does not answer."""
        self.over.set()
        if not self.monitor.mute.is_set():
            self.thread.join(2 * INTERVAL)

    def _run(self) -> None:
        while not self.over.wait(INTERVAL):
            doing = self.look()
            if doing.since is not None:
                self._wait(doing, doing.since)

    def _wait(self, doing: Activity, since: float) -> None:
        """One wait of the rank, until it is over."""
        timeout = self.timeout()
        still = stillness(timeout)
        seen: deque[Heartbeats | None] = deque(maxlen=1 + round(still / INTERVAL))
        warn = min(WARNING, timeout)
        while self.look() == doing and not self.over.wait(INTERVAL):
            waited = time.monotonic() - since
            # Sooner than the timeout, where a socket tells that nobody will come.
            gone = self.gone(doing)
            if gone is not None:
                self.stop(gone)
                self.over.set()
                return
            if waited < min(warn, timeout - still):
                continue  # nothing is asked of the store in vain
            seen.append(self.monitor.heartbeats())
            # Until `seen` is full, whoever has given any sign of life counts as alive.
            before = seen[0] if len(seen) == seen.maxlen else {}
            assert doing.waits_for is not None
            monitor = self.monitor
            wait = Wait(
                monitor.rank, monitor.size, doing.waits_for, waited, timeout, before, seen[-1]
            )
            failure = wait.failure() if waited >= timeout else None
            if failure is not None and self.look() == doing:
                self.stop(failure)
                self.over.set()
            elif waited >= warn:
                warn *= 2
                _warn(wait)


def stillness(timeout: float) -> float:
    """Seconds without a sign of life in which a rank that keeps Python to itself now and then, as
    compilers do, is still believed to live."""
    return min(timeout, max(10 * INTERVAL, 0.1 * timeout))


def _warn(wait: Wait) -> None:
    """Of the ranks that wait, the first one warns."""
    working = wait.working()
    first = min(set(range(wait.size)) - {rank for rank, _ in working})
    for rank, beat in working[:3]:
        log.log(
            logging.WARNING if wait.rank == first else logging.DEBUG,
            "rank %d has waited %.0f s for rank %d, which gives signs of life: it is in %s for "
            "%.0f s, and is waited for",
            *(wait.rank, wait.seconds, rank, beat.doing, beat.seconds),
        )
