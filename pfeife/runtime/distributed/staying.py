"""A rank whose script has ended stays while others may ask for its state."""

import logging
import sys
import time
from typing import TYPE_CHECKING

from pfeife.runtime.distributed.diagnosis import lives
from pfeife.runtime.distributed.heartbeat import ENDED, Doing, Monitor
from pfeife.runtime.distributed.patience import stillness
from pfeife.runtime.distributed.script import Rest

if TYPE_CHECKING:
    from pfeife.runtime.distributed.world import World

log = logging.getLogger("pfeife")
_TICK = 0.05  # seconds


def stay(world: "World") -> None:
    """Returns when the scripts of all ranks have ended, at once after a failure or an exception.

    Meanwhile this rank answers questions, and nothing else: its other connections are closed, so
    that a rank that makes a further step fails, as if this process had ended.
    """
    divided, store = world.ownership.divided(world.size), world.monitor.store
    world.monitor.ask(lambda: store.set(f"over {world.rank}", ""))
    if not divided or world.failure is not None or hasattr(sys, "last_value"):
        return
    late = world.service.wrong()
    if late is not None:  # no call comes that would raise it
        log.error("rank %d: %s", world.rank, late)
    world.disconnect()
    world.look = lambda: Doing(ENDED)
    with world.script.resting(Rest.END):
        _wait_for_others(world)


def _wait_for_others(world: "World") -> None:
    """Until all ranks have ended, any has failed, or those that have not give no sign of life."""
    monitor = world.monitor
    before, looked = monitor.heartbeats(), time.monotonic()
    while world.failure is None:
        running = monitor.ask(lambda: [r for r in range(monitor.size) if not _is_over(monitor, r)])
        if not running:  # or the store is gone
            return
        if time.monotonic() > looked + stillness(world.timeout):
            now = monitor.heartbeats()
            if not any(lives(rank, before, now) for rank in running):
                return
            before, looked = now, time.monotonic()
        time.sleep(_TICK)


def _is_over(monitor: Monitor, rank: int) -> bool:
    return monitor.store.check([f"over {rank}"])
