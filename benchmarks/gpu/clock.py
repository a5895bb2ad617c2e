"""Seconds of work on a device."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from gpu.rows import Setting


def wait(setting: Setting) -> None:
    if setting.cuda:
        for device in setting.devices:
            torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], setting: Setting, repeats: int) -> float:
    """Each of some repeats, queued one behind another, after two that nobody counts."""
    for _ in range(2):
        work()
    wait(setting)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    wait(setting)
    return (time.perf_counter() - start) / repeats


def in_turn(
    works: Mapping[str, Callable[[], object]], setting: Setting, repeats: int
) -> dict[str, float]:
    """The median seconds of each, all done in turn, after three rounds that nobody counts, by
    whatever kernels are fast."""
    torch.use_deterministic_algorithms(False)
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(3 + repeats):
        for name, work in works.items():
            wait(setting)
            start = time.perf_counter()
            work()
            wait(setting)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken[3:]) for name, taken in times.items()}
