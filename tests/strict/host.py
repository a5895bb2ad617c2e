"""The threads of ranks: one runs at a time, until it has to wait."""

import threading
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

from strict.circle import Stuck, described
from strict.gpu import Gpu, Machine, Operation


class Pace(Enum):
    """How far a host runs ahead of its GPU. It may be kept anywhere: by a value that it reads, or
    by about a thousand kernels that are queued. Whoever computes waits for all that arrives."""

    AHEAD = "it never waits for a stream"
    KEPT = "it waits with the compute stream for each message"
    COMPUTING = "it waits for each operation"


class _Stopped(BaseException):
    """Ends a thread whose rank will never go on."""


class Host:
    """A rank's thread. While it `waits` there are what it waits for: operations, or hosts that
    must come to the same."""

    def __init__(self, machine: Machine, rank: int, pace: Pace = Pace.AHEAD):
        self.rank, self.machine, self.pace = rank, machine, pace
        self.where: Callable[[], str] = lambda: "the beginning"
        self.gpu = Gpu(machine, rank, lambda: self.where())
        machine.gpus.append(self.gpu)
        self.go, self.back = threading.Semaphore(0), threading.Semaphore(0)
        self.until: Callable[[], bool] = lambda: True
        self.waits: Callable[[], Iterable[Any]] = tuple
        self.why = ""
        self.ended = self.stopped = False
        self.result: Any = None
        self.error: BaseException | None = None

    def block(
        self, why: str, until: Callable[[], bool], waits: Callable[[], Iterable[Any]] = tuple
    ) -> None:
        """Returns when `until` holds; meanwhile others run."""
        self.machine.settle()
        if until():
            return
        self.why, self.until, self.waits = why, until, waits
        self.back.release()
        self.go.acquire()
        if self.stopped:
            raise _Stopped
        self.why, self.waits = "", tuple

    def synchronize(self, operation: Operation | None, why: str) -> None:
        """Until an operation is done."""
        if operation is not None:
            self.block(why, lambda: operation.done, lambda: [operation])

    def waits_with(self, operation: Operation) -> None:
        """The current stream waits for an operation, and so does the host at some paces."""
        self.gpu.current.post(f"a wait for: {operation.what}", operation)
        kept = self.pace == Pace.KEPT and self.gpu.current is self.gpu.compute
        if kept or self.pace == Pace.COMPUTING:
            self.synchronize(operation, "waits until it is done")

    def resume(self) -> None:
        self.go.release()
        self.back.acquire()

    def run(self, job: Callable[[], Any]) -> None:
        self.go.acquire()
        try:
            if not self.stopped:
                self.result = job()
        except _Stopped:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self.back.release()


def run_hosts(machine: Machine, hosts: Sequence[Host], jobs: Sequence[Callable[[], Any]]) -> list:
    """What each rank's job returns, once all that it has posted is done. Raises Stuck, with what
    waits for what, when nothing can go on; what a job raised; Mismatch."""
    threads = [
        threading.Thread(target=host.run, args=(job,), daemon=True)
        for host, job in zip(hosts, jobs, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        _in_turn(machine, hosts)
        machine.settle()
        if any(stream.posted for gpu in machine.gpus for stream in gpu.streams):
            raise Stuck(described(hosts))
    finally:
        for host in hosts:
            host.stopped = True
            if not host.ended:
                host.resume()
        for thread in threads:
            thread.join()
    return [host.result for host in hosts]


def _in_turn(machine: Machine, hosts: Sequence[Host]) -> None:
    while not all(host.ended for host in hosts):
        ready = [host for host in hosts if not host.ended and host.until()]
        if not ready:
            raise Stuck(described(hosts))
        for host in ready:
            host.resume()
            machine.settle()
            if host.error is not None:
                raise host.error
