"""A rank whose script has ended stays while others may ask for its state."""

import logging
import sys
import time
from collections.abc import Callable

from pfeife.runtime.distributed.liveness.diagnosis import lives
from pfeife.runtime.distributed.liveness.heartbeat import ENDED, Activity, Monitor
from pfeife.runtime.distributed.liveness.watchdog import stillness
from pfeife.runtime.distributed.peers import Peers
from pfeife.runtime.distributed.served.script_point import Rest

log = logging.getLogger("pfeife")
_TICK = 0.05  # seconds


def stay(
    peers: Peers,
    divided: bool,
    wrong: Callable[[], Exception | None],
    disconnect: Callable[[], None],
) -> None:
    """Returns when the scripts of all ranks have ended, at once after a failure or an exception, or
    if no state is `divided` among them.

    Meanwhile this rank answers questions, and nothing else: its other connections are closed, so
    that a rank that makes a further step fails, as if this process had ended. `wrong` says what is
    wrong with what it has answered.
    """
    store = peers.monitor.store
    peers.monitor.ask(lambda: store.set(f"over {peers.rank}", ""))
    if not divided or peers.failure is not None or hasattr(sys, "last_value"):
        return
    # Only now: a script that has failed has more to say than this.
    late = wrong()
    if late is not None:  # no call comes that would raise it
        log.error("rank %d: %s", peers.rank, late)
    disconnect()
    with peers.at(lambda: Activity(ENDED)), peers.script.resting(Rest.END):
        _wait_for_others(peers)


def _wait_for_others(peers: Peers) -> None:
    """Until all ranks have ended, any has failed, or those that have not give no sign of life."""
    monitor = peers.monitor
    before, looked = monitor.heartbeats(), time.monotonic()
    while peers.failure is None:
        running = monitor.ask(lambda: [r for r in range(monitor.size) if not _is_over(monitor, r)])
        if not running:  # or the store is gone
            return
        if time.monotonic() > looked + stillness(peers.timeout):
            now = monitor.heartbeats()
            # A rank that was stopped or killed would keep this process for ever.
            if not any(lives(rank, before, now) for rank in running):
                return
            before, looked = now, time.monotonic()
        time.sleep(_TICK)


def _is_over(monitor: Monitor, rank: int) -> bool:
    return monitor.store.check([f"over {rank}"])
