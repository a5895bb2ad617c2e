"""What a rank of `nccl` does, with the variables of torchrun: scenarios that it is asked for."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[depth]) for depth in (1, 2)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import pfeife  # noqa: E402
from gpu import cases  # noqa: E402
from gpu.beside_eager import (  # noqa: E402
    SUMMED,
    Rounding,
    accumulated,
    alike,
    deterministic,
    of_gradients,
    values_of,
)
from gpu.correctness import REPLICATED, fused, ranks_of  # noqa: E402
from gpu.rows import Setting, Wrong  # noqa: E402
from gpu.workers import serve  # noqa: E402
from pfeife.data.machine import Mesh  # noqa: E402
from pfeife.ir.parts import Reduction  # noqa: E402
from pfeife.lowering.buckets import Bucket  # noqa: E402
from pfeife.runtime.distributed.links.reducing import Reducing, Route  # noqa: E402
from pfeife.runtime.distributed.pipeline import DistributedPipeline  # noqa: E402
from pfeife.runtime.distributed.process_group import join_world, leave_world  # noqa: E402
from pfeife.runtime.distributed.state.remote_gradients import is_here  # noqa: E402
from pfeife.runtime.distributed.world.world import World  # noqa: E402
from pfeife.runtime.failure import Failure  # noqa: E402

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CUDA = os.environ["GPU_ROWS_DEVICE"] == "cuda"
DEVICE = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if CUDA else "cpu")
SMALL = os.environ["GPU_ROWS_SMALL"] == "1"
SETTING = Setting((str(DEVICE),), SMALL)
MICROBATCHES, LATE, TIMEOUT = 4, 4.0, 6.0
Told = dict[str, Any]


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def begin() -> None:
    """torch's own process group, which the world then takes."""
    if CUDA:
        torch.cuda.set_device(DEVICE)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if CUDA else "gloo", rank=RANK, world_size=SIZE)


def probe() -> Told:
    begin()
    one = torch.full((4,), float(RANK + 1), device=DEVICE)
    dist.all_reduce(one)
    assert one.tolist() == [SIZE * (SIZE + 1) / 2] * 4, one
    return {"backend": dist.get_backend()}


def alone() -> Told:
    """All calls of the world's that one rank can make, then its end by a failure."""
    told = probe()
    assert join_world(DEVICE) is None, "a process alone needs no world"
    world = World(DEVICE, 60.0)
    one = torch.arange(4.0, device=DEVICE)
    assert world.from_all_ranks("text") == [world.from_rank_zero("text")]
    world.broadcast(one.view(torch.uint8), 0)
    assert world.agreed("alike", "this row", number=3).numbers == (3,)
    assert len(world.checksums([one])) == 1
    assert torch.equal(world.gather(one)[0], one)
    bucket = Bucket((Reduction("w", (0,), (0,)),), ((4,),), torch.float32)
    route = Route(bucket, Mesh(1), 0, world.connection_of([0], "reduce"))
    flat, scratch = route.packed([one]), torch.empty(64, dtype=torch.uint8, device=DEVICE)
    begun = world.reducer.begin(lambda: route.run(flat, scratch, None), (flat, scratch))
    sums = Reducing(begun, world.wait, route.sums(flat), flat).wait()
    assert torch.equal(sums["w"], one)
    start = time.monotonic()
    world.stop(Failure(0, "this row", "on purpose"))
    try:
        world.check()
    except pfeife.PipelineError:
        world.close()
        return {**told, "s of the end": time.monotonic() - start}
    raise Wrong("a world that was stopped goes on")


def directions() -> Told:
    """Both ranks send a large message at once, on a connection a direction, the receive posted
    before or after: on one connection this would be a circle under NCCL."""
    begin()
    world = join_world(DEVICE, TIMEOUT)
    assert world is not None
    ways = [world.connection_of([0, 1], way) for way in ("down", "up")]
    size = 2**16 if SMALL else 2**26
    away, here = ways if RANK == 0 else ways[::-1]
    sent = torch.full((size,), RANK, dtype=torch.uint8, device=DEVICE)
    got = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    times = []
    for turn in range(6):
        wait()
        dist.barrier()
        start = time.perf_counter()
        calls = [
            lambda: away.group.send([sent], 1 - RANK, 0),
            lambda: here.group.recv([got], 1 - RANK, 0),
        ]
        works = [call() for call in (calls if turn % 2 else calls[::-1])]
        for work in works:
            work.wait()
        wait()
        times.append(time.perf_counter() - start)
        assert got.eq(1 - RANK).all().item()
    return {"GB/s each way": 1e-9 * size / sorted(times)[2], "MiB": size / 2**20}


def train(name: str, kind: str) -> Told:
    """Steps of `pfeife.compile` beside eager accumulation on this rank's device: the loss, and the
    gradients and buffers that this rank has."""
    deterministic()
    one = cases.case(name, SETTING)
    options: Told = {"stages": SIZE, "schedule": kind}
    rounding = Rounding(1e-5, SUMMED, of_gradients(one.tied)) if one.tied else Rounding(0.0, "")
    if kind == "replicas":
        options = {"stages": 1, "replicas": SIZE}
        rounding = Rounding(1e-5, REPLICATED)
    batch = one.batch()
    parts = list(zip(*(tensor.chunk(MICROBATCHES) for tensor in batch), strict=True))
    wanted = dict(accumulated(one.copy(), parts))
    step = pfeife.compile(
        one.step, microbatches=MICROBATCHES, progress=False, timeout=60, **options
    )
    seconds = []
    for turn in range(3):
        one.model.zero_grad()
        wait()
        start = time.perf_counter()
        loss = step(*batch)
        loss.backward()
        wait()
        seconds.append(time.perf_counter() - start)
        if turn == 0:
            found = {"loss": loss.detach()}
            found |= {
                f"gradient of {n}": p.grad.clone()
                for n, p in one.model.named_parameters()
                if is_here(p.grad)
            }
    known = {key: value for key, value in wanted.items() if key in found}
    figures = alike(found, known, rounding)
    return {**figures, "of all": len(wanted), "later ms": 1e3 * seconds[-1]}


def levels(name: str, family: str) -> Told:
    """The toolkit's own pipeline of a family, two stages a rank where that can be, twice."""
    one = fused(name, SETTING)
    program, schedule = ranks_of(one, SETTING, family, [str(DEVICE)] * SIZE)
    pipeline = DistributedPipeline(program, schedule, DEVICE, timeout=60)
    for _ in range(2):
        found = values_of(pipeline(one.state, one.microbatches))
    return alike(found, {key: value for key, value in one.wanted.items() if key in found})


def late() -> Told:
    """Rank 1 comes some seconds after rank 0, which must only wait."""
    one = cases.case("GPT", SETTING)
    step = pfeife.compile(one.step, microbatches=4, stages=2, progress=False, timeout=60)
    batch, losses = one.batch(), []
    for turn in range(3):
        if turn == RANK:
            time.sleep(LATE)
        loss = step(*batch)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[-1], losses
    return {"late s": LATE}


def lost(how: Callable[[], None]) -> Told:
    """Rank 1 goes in the middle of the third step; rank 0 tells when and how it heard of that."""
    one = cases.case("GPT", SETTING)
    step = pfeife.compile(
        one.step, microbatches=4, stages=2, progress=False, timeout=TIMEOUT, on_step=None
    )
    batch = one.batch()
    for _ in range(2):
        step(*batch).backward()
    wait()
    start = time.monotonic()
    if RANK == 1:
        how()
        return {}
    try:
        for _ in range(3):
            step(*batch).backward()
    except pfeife.PipelineError as error:
        return {"error": str(error)[:200], "seconds": time.monotonic() - start}
    raise Wrong("rank 0 has heard of nothing")


def memory() -> Told:
    """The account of bytes of a rank against the allocator's statistics."""
    from gpu.measuring import MEMORY, language
    from gpu.timing import lowered
    from pfeife.cost import memory_curves
    from pfeife.runtime.profile import profile_memory

    one = language(SETTING)
    program, schedule = lowered(one, SIZE, ranks=SIZE)
    pipeline = DistributedPipeline(program, schedule, DEVICE, timeout=60)
    state = pfeife.state_of(program, one.model)
    said = memory_curves(program, schedule)[RANK]
    found = profile_memory(pipeline, state, one.microbatches)[RANK]
    ratio = said.peak / found.peak
    figures = {f"ratio of rank {RANK}'s peak": ratio, f"MiB of rank {RANK}": found.peak / 2**20}
    if abs(ratio - 1) > MEMORY:
        raise Wrong("the account is off", **figures)
    return figures


def links() -> Told:
    """`bench_network`, and how long its messages take."""
    from pfeife.cost.network import bench_network

    join_world(DEVICE, 60)
    sizes = (2**10, 2**16, 2**22) if SMALL else (2**10, 2**16, 2**22, 2**26)
    link = bench_network(sizes=sizes, repeats=5, device=DEVICE).links[0]
    return {
        f"{size / 1024:.0f} KiB us": 1e6 * taken
        for size, taken in zip(link.sizes[1:], link.seconds[1:], strict=True)
    }


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


SCENARIOS: dict[str, Callable[..., Told]] = {
    **{"probe": probe, "alone": alone, "directions": directions, "train": train, "late": late},
    "levels": levels,
    **{"killed": lambda: lost(kill), "hung": lambda: lost(stop), "memory": memory, "links": links},
}


def run(scenario: str) -> Told:
    name, *arguments = scenario.split()
    return SCENARIOS[name](*arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(run)
    leave_world()
