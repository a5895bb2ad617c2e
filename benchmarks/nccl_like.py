"""Ranks whose process groups fail as NCCL's do, where they are told to.

    python benchmarks/nccl_like.py                           # all faults, two at a time
    python benchmarks/nccl_like.py "an abort that blocks"    # one of them

What the ranks say is printed as JSON; tests/runtime/distributed/world/test_world.py judges it.

The groups stand in for torch's `ProcessGroupNCCL`, which this machine cannot run; all else is what
runs on GPUs: real processes, their stores, signs of life and schedules. As NCCL's, a group connects
in its first call; what waits for a group that was aborted comes out of it without an error; that
another process has gone is not noticed. A wait keeps the caller, as where the host waits for its
stream in every action, or, where the host is `ahead`, what is computed next (of no meaning then).
Messages go by Gloo.
"""

import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import attrs
import torch
import torch.distributed as dist
from fault_ranks import told
from faulty import Case, case
from forked import Launch, Report

from pfeife import _torch
from pfeife.runtime.distributed import process_group, transport
from pfeife.runtime.distributed.control import peers
from pfeife.runtime.distributed.liveness import ending
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.distributed.world import world
from pfeife.runtime.failure import PipelineError

LONG = 600.0  # seconds
AT_ONCE = 2  # faults, each of two ranks: more would time the machine
STRUCK = 1  # the rank that a fault befalls
CALLS = ("send", "recv", "broadcast", "allgather", "allreduce", "alltoall_base", "_allgather_base")


@attrs.define
class Fault:
    """What befalls the `at`th message of the step in which it is armed, and each abort."""

    message: str = ""  # "hangs", "raises", "kills" as the watchdog does
    abort: str = ""  # "blocks", "raises"
    shutdown: str = ""  # "blocks"
    connecting: str = ""  # "hangs"
    timeout: float = 3.0  # of the ranks, in seconds
    ahead: bool = False  # whether no rank waits for messages, which its device would do
    at: int = 3
    armed: bool = False

    def next(self) -> str:
        if not self.armed:
            return ""
        self.at -= 1
        return self.message if self.at == 0 else ""


FAULTS = {
    "a message that hangs, a shutdown that blocks": Fault("hangs", shutdown="blocks"),
    "a message that hangs, the host ahead": Fault("hangs", ahead=True),
    "an error in a wait, an abort that raises": Fault("raises", abort="raises", timeout=60.0),
    "an abort that blocks": Fault("hangs", abort="blocks"),
    "a watchdog that ends its process": Fault("kills", timeout=60.0),
    "connecting that hangs": Fault(connecting="hangs"),
}
mine = Fault()  # this process's
aborts: list[bool] = []  # whether each came from the main thread
stream: "list[Queued]" = []  # what this process's device waits for
ahead = False


class Queued(dist.Work):
    """What a group has begun; without `inner` it is never over."""

    def __init__(self, group: "NcclLike", inner: dist.Work | None, error: str = ""):
        super().__init__()
        self.group, self.inner, self.error = group, inner, error
        self.done = threading.Event()
        self.after = Mark() if ahead else None  # it begins behind what the device has to do
        threading.Thread(target=self._finish, daemon=True).start()

    def _finish(self) -> None:
        if self.error:
            self.done.set()
        if self.inner is not None:
            try:
                self.inner.wait(timedelta(seconds=LONG))
                self.done.set()
            except RuntimeError:  # the other process has gone, which NCCL does not notice
                pass

    def is_completed(self) -> bool:
        if self.after is not None and self.after.query():
            self.after = None
        return (self.after is None and self.done.is_set()) or self.group.aborted.is_set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if ahead:
            stream.append(self)
            return True
        while not self.is_completed():
            time.sleep(0.005)
        if self.error:
            raise dist.DistBackendError(self.error)
        return True


class Mark:
    """In the place of an event on the device's stream."""

    def __init__(self, device: torch.device | None = None):
        self.before = len(stream)

    def query(self) -> bool:
        return all(one.is_completed() for one in stream[: self.before])


class NcclLike:
    """In the place of `torch.distributed.ProcessGroupNCCL`."""

    class Options:
        pass

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options):
        self.made, self.aborted = (store, rank, size), threading.Event()

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    @functools.cached_property
    def inner(self) -> Any:
        if mine.connecting == "hangs":
            time.sleep(LONG)  # in C, without Python's lock
        return _torch.gloo_group(*self.made, timedelta(seconds=LONG), _torch.gloo_device())

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            raise AttributeError(name)
        return functools.partial(self._begin, name)

    def _begin(self, name: str, *given: Any) -> Queued:
        if self.aborted.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted")
        strike = mine.next()
        if strike == "kills":
            os.kill(os.getpid(), signal.SIGABRT)
        if strike == "hangs":
            return Queued(self, None)
        begun = getattr(self.inner, name)(*given)
        return Queued(self, begun, "NCCL error: remote process exited" if strike else "")

    def abort(self) -> None:
        aborts.append(threading.current_thread() is threading.main_thread())
        if mine.abort == "blocks":
            time.sleep(LONG)
        self.aborted.set()
        if "inner" in vars(self):  # or its threads would be left when Python ends
            other = 1 - self.inner.rank()
            with contextlib.suppress(RuntimeError):
                self.inner.recv([torch.zeros(1)], other, 2**30).wait(timedelta(milliseconds=1))
        if mine.abort == "raises":
            raise dist.DistBackendError("ProcessGroup abort timed out")

    def shutdown(self) -> None:
        if mine.shutdown == "blocks":
            time.sleep(LONG)


def rank_of(tried: Case, fault: Fault) -> Any:
    """A good step, one in which the fault strikes, and a good one again."""

    def main(rank: int, report: Report) -> None:
        global ahead, mine
        torch.set_num_threads(1)
        dist.ProcessGroupNCCL = NcclLike  # type: ignore[attr-defined]
        peers.goes_by_nccl = lambda device: True  # type: ignore[assignment]
        peers.GRACE = world.GRACE = process_group.GRACE = ending.CHANCE = 1.5
        transport.queued_by_now = Mark  # type: ignore[assignment]
        ahead = fault.ahead
        if rank == STRUCK:
            mine = fault
        try:
            report(event="begun")
            pipeline = DistributedPipeline(tried.program, tried.schedule, timeout=fault.timeout)
            good = pipeline(tried.state, tried.batch).loss
            mine.armed = True
            report(event="armed")
            pipeline(tried.state, tried.batch)
            report(event="nothing")
        except PipelineError as error:
            report(**told(error), aborts=len(aborts), main=any(aborts))
            if fault.connecting or fault.message == "kills":
                raise
            again = pipeline(tried.state, tried.batch).loss
            report(event="again", same=ahead or bool(torch.equal(good, again)))
        report(event="over")

    return main


def main() -> None:
    tried = case("1f1b", 2)
    chosen = {name: FAULTS[name] for name in sys.argv[1:] or FAULTS}
    launches: dict[str, Launch] = {}
    for at in range(0, len(chosen), AT_ONCE):
        some = [*chosen.items()][at : at + AT_ONCE]
        launches |= {name: Launch(2, rank_of(tried, fault), seconds=60) for name, fault in some}
        while not all([one.poll() for one in launches.values()]):  # all: they are killed late
            time.sleep(0.05)
    found = {}
    for name, one in launches.items():
        codes = {rank: process.code for rank, process in one.ranks.items()}
        reports = one.reports()
        struck = max(r["time"] for r in reports if r["event"] in ("begun", "armed"))
        seconds = {rank: process.ended - struck for rank, process in one.ranks.items()}
        found[name] = {"codes": codes, "seconds": seconds, "reports": reports, "log": one.close()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
