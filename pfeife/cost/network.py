"""How long a message takes from one rank to another, measured."""

import statistics
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from scipy.optimize import nnls

from pfeife.plan import Link, Network

SIZES = tuple(4**power for power in range(5, 13))  # 1 KiB to 16 MiB


def bench_network(
    *, sizes: Sequence[int] = SIZES, repeats: int = 7, device: torch.device | None = None
) -> Network:
    """Every pair of ranks, both directions, one pair at a time (collective).

    A message of each size is answered by one of a byte; what the byte takes both ways is halved
    and taken off. Medians of `repeats`. Every rank returns all that was measured.
    """
    place = device or torch.device("cpu")
    world = dist.get_world_size()
    links = []
    for source in range(world):
        for destination in range(world):
            if source == destination:
                continue
            times = [_one_way(source, destination, size, repeats, place) for size in (1, *sizes)]
            shared = torch.tensor(times, dtype=torch.float64, device=place)
            dist.broadcast(shared, source)
            measured = shared.tolist()
            answer = measured[0] / 2
            seconds = [max(taken - answer, 1e-9) for taken in measured[1:]]
            links.append(fit(source, destination, sizes, seconds))
    return Network(tuple(links))


def _one_way(source: int, destination: int, size: int, repeats: int, device: torch.device) -> float:
    """Seconds from the first byte sent to the answer, on the source; 0 elsewhere."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    answer = torch.zeros(1, dtype=torch.uint8, device=device)
    taken = []
    dist.barrier()
    for _ in range(repeats + 2):
        start = time.perf_counter()
        if dist.get_rank() == source:
            dist.send(message, destination)
            dist.recv(answer, destination)
            answer.item()
        elif dist.get_rank() == destination:
            dist.recv(message, source)
            dist.send(answer, source)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:]) if dist.get_rank() == source else 0.0


def fit(source: int, destination: int, sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """A rising piecewise-linear function of the size with knots at the sizes.

    Non-negative least squares over a latency and what every segment adds, errors taken relative
    to the measured times; `residual` is the largest relative error.
    """
    segments = list(pairwise((0, *sizes)))
    rows = []
    for size, measured in zip(sizes, seconds, strict=True):
        parts = [min(max(size - low, 0), high - low) / (high - low) for low, high in segments]
        rows.append([value / measured for value in (1.0, *parts)])
    gained, _ = nnls(rows, [1.0] * len(rows))
    values = tuple(map(float, accumulate(gained)))
    errors = [abs(one / other - 1) for one, other in zip(values[1:], seconds, strict=True)]
    return Link(source, destination, (0, *sizes), values, max(errors))
