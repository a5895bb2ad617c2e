"""The threads of a pipeline, kept from step to step."""

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch


class Threads:
    """Lends a thread for each of `ranks`; they end with this object.

    A new thread would make its OpenMP team anew in each step, and find its caches cold. Each rank
    has the same thread in every step. Steps of one pipeline that run at the same time, called by
    several threads of the user, have a set each: a set that two of them shared could wait for
    itself. After a failure a set is ended, and the next step starts with a new one.
    """

    def __init__(self, ranks: Sequence[int]):
        self.ranks = ranks
        # By processes: a fork has the objects of the other one, but not its threads.
        self.idle: defaultdict[int, list[list[ThreadPoolExecutor]]] = defaultdict(list)

    @contextlib.contextmanager
    def lent(self) -> Iterator[list[ThreadPoolExecutor]]:
        """A thread a rank while a step runs; if that raises, after all of them have ended."""
        idle = self.idle[os.getpid()]
        # Not asked before: two threads of the user may want the last one.
        try:
            threads = idle.pop()
        except IndexError:
            threads = [ThreadPoolExecutor(1, f"pfeife rank {rank}") for rank in self.ranks]
        try:
            yield threads
        except BaseException:
            # What still runs there has the step's tensors, and writes to them.
            for thread in threads:
                thread.shutdown()
            raise
        idle.append(threads)


class Caller:
    """What the thread that begins a step has set for itself, for those that compute for it.

    Their results would have other bits otherwise: oneDNN's convolutions do with another number of
    threads. On CUDA they compute on its streams, else they would read what it has queued there
    before it is there, and it what they have.
    """

    def __init__(self, devices: Collection[torch.device]):
        self.kernel_threads, self.flushes = torch.get_num_threads(), flushes_denormals()
        cuda = [device for device in devices if device.type == "cuda"]
        self.streams = {device: torch.cuda.current_stream(device) for device in cuda}

    @contextlib.contextmanager
    def here(self, device: torch.device | None) -> Iterator[None]:
        """The same for this thread, whose current GPU is the device."""
        torch.set_num_threads(self.kernel_threads)
        torch.set_flush_denormal(self.flushes)
        with contextlib.ExitStack() as entered:
            # The device comes last: what is entered last makes its GPU the current one.
            for place in sorted(self.streams, key=lambda place: place == device):
                entered.enter_context(torch.cuda.stream(self.streams[place]))
            yield


def flushes_denormals() -> bool:
    """Whether this thread takes numbers too small to be normal for zero (`set_flush_denormal`). A
    thread inherits that when it starts, and torch has no question for it."""
    return sys.float_info.min / 2 == 0.0
