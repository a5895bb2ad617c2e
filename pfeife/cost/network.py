"""How long a message takes from one rank to another, measured."""

import itertools
import statistics
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise

import scipy  # whose parts are loaded when they are asked for
import torch
import torch.distributed as dist

from pfeife.data.link import Link
from pfeife.data.network import Network
from pfeife.data.progress import Progress

SIZES = tuple(4**power for power in range(5, 13))  # 1 KiB to 16 MiB


def bench_network(
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 7,
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> Network:
    """Every pair of ranks, both directions, one pair at a time (collective).

    Alone: a message of each size is answered by one of a byte; what the byte takes both ways is
    halved and taken off. With both ranks computing: how much longer the same computation takes
    while a message leaves or arrives. Medians of `repeats`. Every rank returns all that was
    measured. `progress` is called with how many of how many pairs are done.
    """
    place = device or torch.device("cpu")
    world = dist.get_world_size()
    pairs = list(itertools.permutations(range(world), 2))
    links = []
    for done, (source, destination) in enumerate(pairs):
        alone = [_one_way(source, destination, size, repeats, place) for size in (1, *sizes)]
        alone = _shared(alone, source, place)
        seconds = [max(taken - alone[0] / 2, 1e-9) for taken in alone[1:]]
        lost = [
            _lost(source, destination, size, taken, repeats, place)
            for size, taken in zip(sizes, seconds, strict=True)
        ]
        knots = (0, *sizes)
        values, residual = piecewise_fit(sizes, seconds)
        sending, receiving = (
            piecewise_fit(sizes, _shared(lost, rank, place))[0] for rank in (source, destination)
        )
        links.append(Link(source, destination, knots, values, sending, receiving, residual))
        if progress:
            progress(done + 1, len(pairs))
    return Network(tuple(links))


def _shared(mine: Sequence[float], source: int, device: torch.device) -> list[float]:
    """One rank's figures, on every rank."""
    shared = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.broadcast(shared, source)
    return shared.tolist()


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


def _lost(
    source: int, destination: int, size: int, alone: float, repeats: int, device: torch.device
) -> float:
    """Seconds by which a computation of twice the transfer's time is longer with it than
    without, on either end, and at least those of the call that sends; 0 elsewhere.

    As in the runtime, the receive is posted before the message is sent.
    """
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    operand = torch.ones(96, 96, device=device)

    def compute(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            operand @ operand
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    here = dist.get_rank() in (source, destination)
    compute(20)
    count = max(20, int(2 * alone / (compute(100) / 100))) if here else 0
    without, beside, calls = [], [], [0.0]
    work: dist.Work | None = None
    for _ in range(repeats + 1):
        dist.barrier()
        without.append(compute(count))
        if dist.get_rank() == destination:
            work = dist.irecv(message, source)
        dist.barrier()
        start = time.perf_counter()
        if dist.get_rank() == source:
            work = dist.isend(message, destination)
            calls.append(time.perf_counter() - start)
        compute(count)
        beside.append(time.perf_counter() - start)
        if work is not None:
            work.wait()
    lost = statistics.median(beside[1:]) - statistics.median(without[1:])
    return max(lost, statistics.median(calls[1:] or [0.0]))


def piecewise_fit(
    sizes: Sequence[int], seconds: Sequence[float]
) -> tuple[tuple[float, ...], float]:
    """A rising piecewise-linear function of the size with knots at 0 and the sizes.

    Non-negative least squares over a latency and what every segment adds, errors taken relative
    to the measured seconds (at least a microsecond). Returns the values at the knots and the
    largest relative error.
    """
    segments = list(pairwise((0, *sizes)))
    scale = [max(measured, 1e-6) for measured in seconds]
    rows = []
    for size, unit in zip(sizes, scale, strict=True):
        parts = [min(max(size - low, 0), high - low) / (high - low) for low, high in segments]
        rows.append([value / unit for value in (1.0, *parts)])
    wanted = [measured / unit for measured, unit in zip(seconds, scale, strict=True)]
    gained, _ = scipy.optimize.nnls(rows, wanted)
    values = tuple(map(float, accumulate(gained)))
    errors = [
        abs(one - other) / unit for one, other, unit in zip(values[1:], seconds, scale, strict=True)
    ]
    return values, max(errors)
