"""A rank whose script has ended stays while others may ask for its state."""

import time

from pfeife.runtime.distributed.control.peers import Peers
from pfeife.runtime.distributed.liveness.diagnosis import lives
from pfeife.runtime.distributed.liveness.heartbeat import Monitor
from pfeife.runtime.distributed.liveness.watchdog import stillness

_TICK = 0.05  # seconds


def wait_for_others(peers: Peers) -> None:
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
