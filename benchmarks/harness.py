"""What the benchmarks of real ranks share: agreed costs, plans made ready, timed steps."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

import pfeife
from pfeife import sched
from pfeife.compilers import compile_bodies
from pfeife.data import plain
from pfeife.ir.program import Program
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.distributed.process_group import join_world, leave_world
from pfeife.runtime.distributed.world.world import World

DEVICE = torch.device("cpu")


def command(file: str, ranks: int, arguments: Sequence[str]) -> list[str]:
    """Torchrun with a thread a rank, of which the environment is told.

    Unless --default-malloc is given, glibc is told to keep freed memory: else it returns large
    activations to the system again and again, at moments that nobody can predict (torch's tuning
    guide wants another allocator).
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    if "--default-malloc" not in arguments:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**25)
        os.environ["MALLOC_TRIM_THRESHOLD_"] = str(2**33)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(ranks), file, *arguments]


def launch(file: str, ranks: int = 2) -> None:
    """Replaces this process by torchrun with the same file and arguments."""
    os.execv(sys.executable, command(file, ranks, sys.argv[1:]))


def world(
    file: str,
    ranks: int,
    arguments: Sequence[str],
    seconds: float = 600.0,
    folder: Path | None = None,
) -> None:
    """Runs a file's ranks as processes of their own, in a folder. Raises RuntimeError if they fail,
    or are not done after some `seconds`; nothing of them is left running."""
    with subprocess.Popen(command(file, ranks, arguments), cwd=folder) as agent:
        try:
            code: int | str = agent.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"no end after {seconds:.0f} s"
        finally:
            agent.terminate()  # torchrun ends its ranks, if need be with SIGKILL
    if code:
        raise RuntimeError(f"{ranks} ranks of {file} {' '.join(arguments)}: {code}")


def run(file: str, main: Callable[[], None], ranks: int = 2) -> None:
    """What a benchmark's file does: starts its ranks, or is one of them."""
    if "RANK" not in os.environ:
        launch(file, ranks)
    torch.set_num_threads(1)
    join_world(DEVICE)
    main()
    dist.barrier()
    leave_world()


def everyone() -> World:
    """The ranks of this benchmark."""
    found = join_world(DEVICE)
    assert found is not None
    return found


def mean_costs(costs: pfeife.Costs) -> pfeife.Costs:
    """The mean of what the ranks have measured, the same on all of them."""
    texts = everyone().from_all_ranks(plain.to_json(costs))
    return one_of_all([plain.from_json(pfeife.Costs, text) for text in texts], statistics.fmean)


def one_of_all(found: list[pfeife.Costs], choose: Callable[[list[float]], float]) -> pfeife.Costs:
    """Costs of the same program, measured several times, as one: by mean, median or the like."""

    def chosen(field: str) -> dict[str, float]:
        parts = [getattr(one, field) for one in found]
        return {name: choose([part[name] for part in parts]) for name in parts[0]}

    return attrs.evolve(found[0], seconds=chosen("seconds"), accumulate=chosen("accumulate"))


def of_rank_zero(plan: pfeife.Plan) -> pfeife.Plan:
    return plain.from_json(pfeife.Plan, everyone().from_rank_zero(plain.to_json(plan)))


@attrs.frozen(eq=False)
class Ready:
    """A plan that can run: the ranks' program, its lowered schedule and pipeline, and a batch."""

    program: Program
    schedule: pfeife.Schedule
    pipeline: DistributedPipeline
    state: Any
    batch: list


def ready(plan: pfeife.Plan, clusters: Program, case: Any, compiler: str = "aot_eager") -> Ready:
    ranks = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(clusters)
    schedule = sched.verify_schedule(sched.lower(plan.schedule, ranks))
    batch = [case.draw() for _ in range(plan.schedule.microbatches)]
    bodies = compile_bodies(ranks, compiler, rank=dist.get_rank())
    pipeline = DistributedPipeline(ranks, schedule, DEVICE, bodies)
    return Ready(ranks, schedule, pipeline, pfeife.state_of(clusters, case.model), batch)


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the slowest rank, and CPU seconds of all ranks' processes together."""
    dist.barrier()
    cpu, start = time.process_time(), time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    busy = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    dist.all_reduce(busy)
    return float(taken), float(busy)


def message_seconds(size: int, repeats: int = 20) -> float:
    """How long a message of so many bytes takes from rank 0 to rank 1 while all others are at
    rest, on every rank: half of there and back, by the median."""
    rank, data, times = dist.get_rank(), torch.zeros(size, dtype=torch.uint8), [0.0]
    for _ in range(repeats if rank < 2 else 0):
        start = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(data, 1 - rank)
            else:
                dist.recv(data, 1 - rank)
        times.append(time.perf_counter() - start)
    median = torch.tensor(statistics.median(times) / 2, dtype=torch.float64)
    dist.broadcast(median, 0)
    return float(median)


def steps(one: Ready) -> list[float]:
    """Seconds of two steps of the slower rank, after one that nobody times."""
    found = []
    for _ in range(3):
        found.append(timed(lambda: one.pipeline.start(one.state, one.batch).run())[0])
    return found[1:]


def in_turn(every: list[Ready], repeats: int) -> list[list[float]]:
    """Steps of all, one after another, again and again."""
    times: list[list[float]] = [[] for _ in every]
    for _ in range(repeats):
        for one, taken in zip(every, times, strict=True):
            taken += steps(one)
    return times
