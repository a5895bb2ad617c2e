"""Steps beside eager's: stages in turn on one device, the runtime's own time, copies beside it."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from models import GPT
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import pfeife
from gpu.cases import words_loss
from gpu.clock import in_turn, wait
from gpu.rows import Row, Setting, Wrong
from pfeife import sched
from pfeife.compilers import compile_bodies
from pfeife.cost import default_machine, estimate, measure
from pfeife.runtime.local import LocalPipeline

ONE_STAGE, FOUR_STAGES = 1.03, 1.05  # times eager's seconds, at most
REPEATS = 7


@attrs.frozen(eq=False)
class Large:
    """A model with its step, and microbatches that are on the device."""

    model: nn.Module
    step: Callable[..., torch.Tensor]
    microbatches: Sequence[tuple[torch.Tensor, ...]]

    @property
    def parameters(self) -> int:
        return sum(one.numel() for one in self.model.parameters())


@functools.cache
def large(setting: Setting) -> Large:
    """A GPT of 350 million parameters in bfloat16, four microbatches of four rows."""
    torch.manual_seed(0)
    sizes = (64, 4, 100, 32, 4) if setting.small else (1024, 24, 32000, 1024, 16)
    rows, (_, _, words, length, _) = (2 if setting.small else 4), sizes
    model = GPT(*sizes).to(setting.device, torch.float32 if setting.small else torch.bfloat16)
    batch = [
        tuple(torch.randint(words, (rows, length), device=setting.device) for _ in range(2))
        for _ in range(4)
    ]
    return Large(model, functools.partial(words_loss, model), batch)


def tiny(setting: Setting, microbatches: int = 8) -> Large:
    """Layers that take next to no time."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16))
    model = nn.Sequential(*layers).to(setting.device)
    batch = [
        tuple(torch.randn(8, 64, device=setting.device) for _ in range(2))
        for _ in range(microbatches)
    ]
    return Large(model, lambda x, y: F.mse_loss(model(x), y), batch)


def eager(one: Large, step: Callable[..., torch.Tensor] | None = None) -> Callable[[], None]:
    """Accumulation by autograd, gradients made anew each time."""

    def work() -> None:
        one.model.zero_grad(set_to_none=True)
        for microbatch in one.microbatches:
            ((step or one.step)(*microbatch) / len(one.microbatches)).backward()

    return work


@functools.cache
def clusters_of(one: Large) -> pfeife.Program:
    clusters = pfeife.fuse()(pfeife.capture(one.step, *one.microbatches[0]))
    device = one.microbatches[0][0].device
    return pfeife.annotate(estimate(clusters, default_machine(device)))(clusters)


@functools.cache
def measured_clusters_of(one: Large) -> pfeife.Program:
    clusters = clusters_of(one)
    return pfeife.annotate(measure(clusters))(clusters)


def lowered(
    one: Large,
    stages: int,
    ranks: int = 1,
    schedule: str = "1f1b",
    microbatches: int = 0,
    costs: Callable[[Large], pfeife.Program] = clusters_of,
) -> tuple[pfeife.Program, pfeife.Schedule]:
    """Stages in turn on so many ranks."""
    clusters = costs(one)
    plan = sched.plan(
        clusters,
        machine=default_machine(one.microbatches[0][0].device),
        microbatches=microbatches or len(one.microbatches),
        stages=stages,
        ranks=ranks,
        schedule=schedule,
    )
    program = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(clusters)
    return program, sched.verify_schedule(sched.lower(plan.schedule, program))


def ours(one: Large, stages: int, compiler: str = "aot_eager") -> Callable[[], object]:
    """A step of all stages on one rank, which is one thread."""
    program, schedule = lowered(one, stages)
    device = one.microbatches[0][0].device
    bodies = compile_bodies(program, compiler)
    pipeline = LocalPipeline(program, schedule, [device], bodies)
    state = pfeife.state_of(program, one.model)
    return lambda: pipeline(state, one.microbatches)


def judged(
    times: dict[str, float], base: str, limits: dict[str, float], setting: Setting, **more: Any
) -> dict[str, Any]:
    """Milliseconds and ratios. Raises Wrong for one over its limit, at sizes that count."""
    figures = {f"{name} ms": 1e3 * taken for name, taken in times.items()}
    ratios = {name: times[name] / times[base] for name in limits}
    figures |= {f"{name} of {base}": ratio for name, ratio in ratios.items()} | more
    over = [name for name, ratio in ratios.items() if ratio > limits[name]]
    if over and not setting.small:
        raise Wrong(f"{over[0]}: at most {limits[over[0]]} times {base}", **figures)
    return figures


def compiled(one: Large, **options: Any) -> Callable[[], None]:
    """A step of `pfeife.compile`, its backward too."""
    step = pfeife.compile(one.step, microbatches=len(one.microbatches), progress=False, **options)
    whole = [torch.cat(tensors) for tensors in zip(*one.microbatches, strict=True)]

    def work() -> None:
        one.model.zero_grad(set_to_none=True)
        step(*whole).backward()

    return work


def stages_in_turn(setting: Setting) -> dict[str, Any]:
    one = large(setting)
    limits = {
        "one stage": ONE_STAGE,
        "four stages": FOUR_STAGES,
        "pfeife.compile": ONE_STAGE,
        "pfeife.compile, four stages": FOUR_STAGES,
    }
    works = {
        "eager": eager(one),
        "one stage": ours(one, 1),
        "four stages": ours(one, 4),
        "pfeife.compile": compiled(one, stages=1),
        "pfeife.compile, four stages": compiled(one, stages=4, devices=[setting.device]),
    }
    times = in_turn(works, setting, REPEATS)
    parameters = f"{one.parameters / 1e6:.0f} M"
    return judged(times, "eager", limits, setting, parameters=parameters)


def actions(setting: Setting) -> dict[str, Any]:
    """Microseconds of this thread that an action takes more than what it computes, by how long a
    step of tiny layers takes to queue."""
    one = tiny(setting)
    queued = {}
    for name, work in {"eager": eager(one), "one": ours(one, 1), "eight": ours(one, 8)}.items():
        taken = []
        for _ in range(12):
            wait(setting)
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
        queued[name] = sorted(taken[2:])[5]
    count = 2 * 8 * len(one.microbatches) - 2 * len(one.microbatches)  # of eight stages over one
    return {
        "eager us": 1e6 * queued["eager"],
        "one stage us": 1e6 * queued["one"],
        "eight stages us": 1e6 * queued["eight"],
        "us an action more": 1e6 * (queued["eight"] - queued["one"]) / count,
    }


def copies_beside(setting: Setting) -> dict[str, Any]:
    """What of the copies between two GPUs runs while kernels do, in a trace."""
    one = large(setting)
    program, schedule = lowered(one, 4, ranks=2)
    devices = [torch.device(name) for name in setting.devices[:2]]
    program = pfeife.place(devices)(program)
    pipeline = LocalPipeline(program, schedule, devices)
    state = pfeife.state_of(program, one.model)
    for _ in range(2):
        pipeline(state, one.microbatches)
    wait(setting)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        pipeline(state, one.microbatches)
        wait(setting)
    spans = [e for e in trace.events() if e.device_type == DeviceType.CUDA]
    between = [e.time_range for e in spans if "PtoP" in e.name]
    kernels = [e.time_range for e in spans if "Memcpy" not in e.name]
    if not between:
        raise Wrong("no copy from GPU to GPU is in the trace", spans=len(spans))
    beside = sum(any(k.start < c.end and c.start < k.end for k in kernels) for c in between)
    figures = {"copies": len(between), "beside kernels": beside}
    if not beside:
        raise Wrong("no copy runs beside a kernel", **figures)
    return figures


ROWS = [
    Row("stages in turn beside eager", stages_in_turn, 150),
    Row("time of an action", actions),
    Row("copies on side streams", copies_beside, 90, cuda=True, devices=2),
]
