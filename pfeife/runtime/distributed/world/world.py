"""The processes that work together, and the state that they train."""

import logging
import sys
import time

import torch

from pfeife.runtime.distributed.control.peers import GRACE, Peers
from pfeife.runtime.distributed.control.script_point import Rest
from pfeife.runtime.distributed.liveness import diagnosis
from pfeife.runtime.distributed.liveness.heartbeat import ENDED, Activity, kept_by_torchrun
from pfeife.runtime.distributed.served.exit_barrier import wait_for_others
from pfeife.runtime.distributed.served.state_server import Service
from pfeife.runtime.distributed.world.ownership import Ownership

log = logging.getLogger("pfeife")

_ASKED = "asked"  # what the connection of the service is for


class World(Peers):
    """The ranks, with who trains what, and the service that answers for it. Built as `Peers`;
    `trained` is what the ranks have trained in another group."""

    def __init__(
        self,
        device: torch.device,
        timeout: float,
        before: "World | None" = None,
        trained: Ownership | None = None,
    ):
        super().__init__(device, timeout, before)
        self.ownership: Ownership = before.ownership if before else trained or Ownership()
        self.ownership.norms.world = self.ownership.copies.world = self
        saving, asking = self.ownership.saving, self.ownership.asking
        # The service has a connection of its own, since it answers while others are in use, and it
        # is on the CPU, so that an answer waits for no kernel.
        try:
            with self.building("the connection of the service"):
                connection = self.connection_of(range(self.size), _ASKED, torch.device("cpu"))
            self.service = asking.service = Service(
                self,
                connection,
                self.ownership.optimizers.find,
                asking.writes,
                asking.renew,
                saving.absent_beside,
            )
        except BaseException:
            self._end_threads()
            raise

    def close(self) -> None:
        """Lets go of the connections of a world that has failed. Whoever has made a step in it may
        keep it for long: torch.compile does."""
        self._end_threads()
        self.service.end()
        self.disconnect()
        self.gloo = None

    def disconnect(self) -> None:
        """Closes all connections but that of the service."""
        self.ends.close()
        self.reducer.close()
        for connection in self.connections.values():
            ending = None if connection is self.service.connection else connection.close()
            if ending is not None:
                self.ending.append(ending)

    def _stay(self) -> None:
        """Returns when the scripts of all ranks have ended: others may still ask for state that
        this one has.

        Meanwhile it answers them, and does nothing else: its other connections are closed, so that
        a rank that makes a further step fails, as if this process had ended."""
        # Only now: a script that has failed has more to say than this.
        late = self.service.wrong()
        if late is not None:  # no call comes that would raise it
            log.error("rank %d: %s", self.rank, late)
        self.disconnect()
        with self.at(lambda: Activity(ENDED)), self.script.resting(Rest.END):
            wait_for_others(self)

    def leave(self) -> None:
        """Tells the others that this process ends, once they need nothing of it; after a failure,
        who keeps the store waits until all that live know of it."""
        if self.monitor.thread.is_alive():
            divided = self.ownership.divided(self.size)
            self.monitor.ask(lambda: self.monitor.store.set(f"over {self.rank}", ""))
            if divided and self.failure is None and not hasattr(sys, "last_value"):
                self._stay()
            if self.failure is not None and self.rank == 0 and not kept_by_torchrun():
                diagnosis.wait_until_known(self.monitor, GRACE)
            # Who keeps the store waits for those that may not know of a failure: not for this one.
            self.monitor.ask(self.monitor.acknowledge)
            self.monitor.ask(lambda: self.beside.set(f"left {self.rank}", ""))
            self._end_threads()
            self.service.end()
        if self.nccl:
            self.disconnect()
            over = time.monotonic() + GRACE
            for thread in self.ending:
                thread.join(max(0.0, over - time.monotonic()))
        self.lifelines.close()
        self.ownership.end()
