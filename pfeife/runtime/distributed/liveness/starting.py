"""The start of the default process group, in which every rank connects with every other one."""

import contextlib
import logging
import threading
from typing import Any

import torch.distributed as dist

from pfeife.data import plain
from pfeife.runtime.distributed.liveness.ending import end_process
from pfeife.runtime.distributed.liveness.heartbeat import INTERVAL, store_gone
from pfeife.runtime.failure import Failure, PipelineError
from pfeife.runtime.threads import started

log = logging.getLogger("pfeife")

_FAILED = "the start has failed"
_CHANCE = 3.0  # seconds in which who has heard of a failure may find its own


def start_group(backend: str, store: Any, rank: int, size: int) -> None:
    """Makes the default process group of ranks that have all come (collective).

    Raises PipelineError if a rank does not reach another one. The others would wait for it there
    for as long as their collectives may take, in a call that nothing ends: they hear of it by the
    store, and their processes end within seconds.
    """
    over = threading.Event()
    started("start", _watch, store.clone(), rank, over)
    try:
        # Without a timeout of ours: the user's own collectives keep that of torch.
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    except RuntimeError as error:
        cause = (
            "it does not reach every other rank; where nodes have several networks, "
            f"GLOO_SOCKET_IFNAME names the interface that they share: {error}"
        )
        failure = Failure(rank, "connecting with the other ranks", cause)
        with contextlib.suppress(RuntimeError):  # the store may be gone
            store.set(_FAILED, plain.to_json(failure))
        raise PipelineError(failure) from error
    finally:
        over.set()


def _watch(store: Any, rank: int, over: threading.Event) -> None:
    """Ends the process of a rank that goes on connecting after another one has failed to."""
    while not over.wait(INTERVAL):
        failure = _heard(store)
        if failure is not None:
            # Its own error, if it has one, says more than that it was ended.
            if not over.wait(_CHANCE):
                log.critical("rank %d ends: %s; this rank waits for it", rank, failure)
                end_process()
            return


def _heard(store: Any) -> Failure | None:
    try:
        if not store.check([_FAILED]):
            return None
        return plain.from_json(Failure, store.get(_FAILED).decode())
    except RuntimeError:
        return store_gone()
