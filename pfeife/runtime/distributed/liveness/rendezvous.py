"""How the ranks find one another: over a store that all of them reach."""

import itertools
import time

from torch import distributed as dist

from pfeife.data import plain
from pfeife.runtime.distributed.liveness.heartbeat import store_gone
from pfeife.runtime.failure import Failure, PipelineError


def rendezvous(store: dist.Store, rank: int, size: int, timeout: float, first: int = 0) -> int:
    """Waits until all ranks are here. Returns the number of the round (`first` or later) in which
    they have met; raises PipelineError if ranks have not come after `timeout` seconds, have left
    their program, or took the store with them.

    A round is over for all when one rank has given it up, and who comes later waits in the next:
    so nobody goes on with a rank that has turned away.

        round 0   ranks 0 and 1 are here, 2 is not: after the timeout the verdict is [2]
        round 1   rank 2 comes, finds the verdict of round 0, and waits here for the others
    """
    for number in itertools.count(first):
        try:
            missing = _round(store, number, rank, size, timeout)
        except dist.DistNetworkError as error:
            raise PipelineError(store_gone()) from error
        if missing is None or rank in missing:
            continue
        if not missing:
            return number
        # All ranks that came are told the same.
        which = f"ranks {missing} of {size} are" if len(missing) > 1 else f"of {size} ranks it is"
        cause = f"it has not arrived: {which} missing (timeout={timeout:g})"
        raise PipelineError(Failure(missing[0], "", cause))
    raise AssertionError("there is a next round")


def _round(
    store: dist.Store, number: int, rank: int, size: int, timeout: float
) -> list[int] | None:
    """The missing ranks of a round, None if it was over before this rank came."""
    verdict = f"round {number}"
    if store.check([verdict]):
        return None
    store.set(f"here {number} {rank}", "")
    missing = set(range(size)) - {rank}
    # Nobody is told to wake up: each looks, at first often, since ranks come at nearly one time.
    deadline, pause = time.monotonic() + timeout, 0.001
    while not store.check([verdict]):
        missing = {peer for peer in missing if not store.check([f"here {number} {peer}"])}
        # A rank that has left its program is not waited for until the timeout.
        gone = any(store.check([f"left {peer}"]) for peer in missing)
        if not missing or gone or time.monotonic() >= deadline:
            text = plain.to_json(tuple(sorted(missing)))
            # The first verdict is that of all ranks, also of one that has found others missing.
            store.compare_set(verdict, "", text)
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return list(plain.from_json(tuple[int, ...], store.get(verdict).decode()))
