"""How long a message takes from one rank to another, measured."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import scipy  # whose parts are loaded when they are asked for
import torch
import torch.distributed as dist

from pfeife.data.link import Link
from pfeife.data.network import Network
from pfeife.data.progress import Progress
from pfeife.lowering.envelope import Envelope, Layout
from pfeife.runtime.distributed.links.buffers import Buffers
from pfeife.runtime.distributed.links.channels import Incoming, Outgoing, Works
from pfeife.runtime.distributed.process_group import join_world
from pfeife.runtime.distributed.world.world import World

_LEAST = 0.01  # of what a message takes, that one takes more which is as much larger
SIZES = tuple(4**power for power in range(5, 13))  # 1 KiB to 16 MiB


def bench_network(
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 7,
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> Network:
    """Every pair of ranks, both directions, one pair at a time (collective).

    Messages go as those of a pipeline do.

    Alone: a message of each size is answered by one of a byte; what the byte takes both ways is
    halved and taken off. With both ranks computing: how much longer the same computation takes
    while a message leaves or arrives. Medians of `repeats`. Every rank returns all that was
    measured. `progress` is called with how many of how many pairs are done.
    """
    place = device or torch.device("cpu")
    world = join_world(place)
    if world is None:
        raise ValueError("links are between processes, and this one is alone: start torchrun")
    pairs = list(itertools.permutations(range(world.size), 2))
    links = []
    for done, (source, destination) in enumerate(pairs):
        line = _Line(world, source, destination)
        # A byte first: half of its way there and back is what the answer takes.
        alone = [_one_way(line, size, repeats) for size in (1, *sizes)]
        alone = _shared(alone, source, place)
        seconds = [max(taken - alone[0] / 2, 1e-9) for taken in alone[1:]]
        lost = [
            _lost(line, size, taken, repeats) for size, taken in zip(sizes, seconds, strict=True)
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


def _shared(figures: Sequence[float], source: int, device: torch.device) -> list[float]:
    """One rank's figures, on every rank."""
    shared = torch.tensor(figures, dtype=torch.float64, device=device)
    dist.broadcast(shared, source)
    return shared.tolist()


class _Line:
    """This rank's ends of one direction between two ranks of a world and of the other one, None on
    others (collective)."""

    def __init__(self, world: World, source: int, destination: int):
        self.world, self.device = world, world.device
        self.ways = {
            True: world.ends.of(source, destination),
            False: world.ends.of(destination, source),
        }
        self.source, self.destination = world.rank == source, world.rank == destination
        self.peer = destination if self.source else source
        self.buffers = Buffers(self.device, world.ends.memory)

    def message(self, size: int, away: bool = True) -> Callable[[], Works]:
        """What sends a message of so many bytes or posts its receive, whichever this rank does."""
        data = torch.zeros(size, dtype=torch.uint8, device=self.device)
        end, envelope = self.ways[away], Envelope((Layout.of(data),))
        if isinstance(end, Outgoing):
            return lambda: end.send((data,), envelope)[0]
        if isinstance(end, Incoming):
            return lambda: end.post(envelope.empty(self.device, self.buffers.take)[1])
        return tuple

    def end(self, works: Works) -> None:
        """Raises PipelineError if the other rank is lost."""
        try:
            for work in works:
                work.wait(*self.world.patience)
        except RuntimeError as error:
            raise self.world.lost(self.peer, error) from error


def _one_way(line: _Line, size: int, repeats: int) -> float:
    """Seconds from the first byte sent to the answer, on the source; 0 elsewhere."""
    message, answer = line.message(size), line.message(1, away=False)
    taken = []
    dist.barrier()
    # The first two rounds are left out below: they make buffers and threads.
    for _ in range(repeats + 2):
        start = time.perf_counter()
        line.end(message())
        line.end(answer())
        if line.device.type == "cuda":
            torch.cuda.synchronize(line.device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:]) if line.source else 0.0


def _lost(line: _Line, size: int, alone: float, repeats: int) -> float:
    """Seconds by which a computation of twice the transfer's time is longer with it than
    without, on either end, and at least those of the call that sends; 0 elsewhere.

    As in the runtime, the receive is posted before the message is sent.
    """
    message = line.message(size)
    operand = torch.ones(96, 96, device=line.device)

    def compute(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            operand @ operand
        if line.device.type == "cuda":
            torch.cuda.synchronize(line.device)
        return time.perf_counter() - start

    # All ranks compute, so that barriers find them alike; only the two ends are asked how long.
    compute(20)
    here = line.source or line.destination
    count = max(20, int(2 * alone / (compute(100) / 100))) if here else 0
    without, beside, calls = [], [], [0.0]
    for _ in range(repeats + 1):
        works: Works = ()
        dist.barrier()
        without.append(compute(count))
        if line.destination:
            works = message()
        dist.barrier()
        start = time.perf_counter()
        if line.source:
            works = message()
            calls.append(time.perf_counter() - start)
        compute(count)
        beside.append(time.perf_counter() - start)
        line.end(works)
    lost = statistics.median(beside[1:]) - statistics.median(without[1:])
    return max(lost, statistics.median(calls[1:] or [0.0]))


def piecewise_fit(
    sizes: Sequence[int], seconds: Sequence[float]
) -> tuple[tuple[float, ...], float]:
    """A rising piecewise-linear function of the size with knots at 0 and the sizes.

    Non-negative least squares over a latency and what every segment adds, errors taken relative
    to the measured seconds (at least a microsecond). Each of these goes on rising a little behind
    its segment, so that noise makes no link infinitely fast. Returns the values at the knots and
    the largest relative error.
    """
    knots = (0, *sizes)
    # Least squares of seconds themselves would fit the largest messages alone.
    scale = [max(measured, 1e-6) for measured in seconds]
    steps = [(0, 0), *pairwise(knots)]  # the first one is the latency
    parts = [[_risen(size, *step, sizes[-1]) for step in steps] for size in knots]
    rows = [[part / unit for part in row] for row, unit in zip(parts[1:], scale, strict=True)]
    wanted = [measured / unit for measured, unit in zip(seconds, scale, strict=True)]
    # Gains are not negative, so that no larger message takes less.
    gained, _ = scipy.optimize.nnls(rows, wanted)
    values = tuple(float(sum(gained * row)) for row in parts)
    errors = [
        abs(fitted - measured) / unit
        for fitted, measured, unit in zip(values[1:], seconds, scale, strict=True)
    ]
    return values, max(errors)


def _risen(size: int, low: int, high: int, last: int) -> float:
    """How far a step from one size to another has been taken: wholly behind it, and a little more
    up to the last size."""
    if size < high:
        return max(size - low, 0) / (high - low)
    return 1.0 + _LEAST * (size - high) / last
