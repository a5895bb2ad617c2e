"""What is measured and predicted, held against the device: costs, memory, steps."""

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from models import GPT, SkipNet
from scipy.stats import spearmanr
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import pfeife
from gpu.clock import in_turn, wait
from gpu.rows import Row, Setting, Wrong
from gpu.timing import Large, clusters_of, lowered, measured_clusters_of
from pfeife import sched
from pfeife.compilers import example
from pfeife.compilers.piece import inputs
from pfeife.cost import default_machine, estimate, measure, memory_curves
from pfeife.data.schedule import Schedule
from pfeife.runtime.local import LocalPipeline
from pfeife.runtime.profile import CudaMemory, LiveTensors

COSTS = 0.1  # of the profiler's seconds
MEMORY = 0.02  # of all bytes
STEPS = 0.05  # of a step, by the median of the configurations


@functools.cache
def language(setting: Setting, width: int = 0, microbatches: int = 8) -> Large:
    """A GPT whose kernels are long enough that the device is what takes the time."""
    from gpu.cases import words_loss

    torch.manual_seed(0)
    sizes = (32, 3, 50, 16, 4) if setting.small else (width or 1024, 6, 8000, 512, 16)
    rows, (_, _, words, length, _) = (2 if setting.small else 8), sizes
    model = GPT(*sizes).to(setting.device)
    batch = [
        tuple(torch.randint(words, (rows, length), device=setting.device) for _ in range(2))
        for _ in range(microbatches)
    ]
    return Large(model, functools.partial(words_loss, model), batch)


@functools.cache
def images(setting: Setting, microbatches: int = 8) -> Large:
    torch.manual_seed(0)
    width, levels, size = (4, 2, 16) if setting.small else (64, 3, 128)
    model = SkipNet(width, levels).to(setting.device)
    batch = [(torch.randn(8, 3, size, size, device=setting.device),) for _ in range(microbatches)]
    return Large(model, lambda x: torch.nn.functional.mse_loss(model(x), x), batch)


def costs(setting: Setting) -> dict[str, Any]:
    """`cost.measure` against the time of the kernels in torch.profiler's trace, body by body."""
    clusters = clusters_of(language(setting))
    measured = measure(clusters, repeats=7)
    longest = sorted(clusters.calls, key=lambda call: -measured.seconds[call.node])[:10]
    pairs = []
    for call in longest:
        body = clusters.body(call)
        arguments = [example(node.meta["val"]) for node in inputs(body)]
        with torch.no_grad():
            body(*arguments)
            pairs.append((measured.seconds[call.node], _traced(lambda: body(*arguments), setting)))  # noqa: B023
    ratios = [ours / theirs for ours, theirs in pairs]
    figures = {
        "bodies": len(pairs),
        "measured ms": 1e3 * sum(ours for ours, _ in pairs),
        "in the trace ms": 1e3 * sum(theirs for _, theirs in pairs),
        "median ratio": statistics.median(ratios),
        "ratios": f"{min(ratios):.3f} to {max(ratios):.3f}",
    }
    if abs(figures["median ratio"] - 1) > COSTS and not setting.small:
        raise Wrong(f"measured seconds are not within {COSTS:.0%} of the trace's", **figures)
    return figures


def _traced(work: Callable[[], object], setting: Setting, repeats: int = 5) -> float:
    """Seconds of the kernels of a repeat (of operations, on a CPU)."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.cuda else [])]
    wait(setting)
    with profile(activities=kinds) as trace:
        for _ in range(repeats):
            work()
        wait(setting)
    if setting.cuda:  # the operations of the host have the times of their kernels once more
        kernels = [one for one in trace.key_averages() if one.device_type == DeviceType.CUDA]
        return sum(one.self_device_time_total for one in kernels) * 1e-6 / repeats
    return sum(one.self_cpu_time_total for one in trace.key_averages()) * 1e-6 / repeats


def memory(setting: Setting, make: Callable[[Setting], Large], stages: int) -> dict[str, Any]:
    """The account of bytes against the allocator's statistics at every action of a rank."""
    one = make(setting)
    program, schedule = lowered(one, stages, costs=measured_clusters_of)
    (account,) = memory_curves(program, schedule)
    device = torch.device(setting.device)
    pipeline = LocalPipeline(program, schedule, [device])
    state = pfeife.state_of(program, one.model)
    ((runner, mine),) = pipeline.start(state, one.microbatches).runners
    runner.run(mine)  # which makes what cuBLAS keeps for a thread
    ((runner, mine),) = pipeline.start(state, one.microbatches).runners
    if setting.cuda:
        watch: Any = CudaMemory(device)
        runner.run(mine, observe=watch(0))
    else:
        known = [*state.values(), *(v for values in mine.values for v in values.values())]
        with LiveTensors(known, device) as watch:
            runner.run(mine, observe=watch(0))
    whole = sum(account.held.values())
    (unmeasured,) = memory_curves(*lowered(one, stages))
    pairs = list(zip(account.points, watch.points, strict=True))
    live = [_off(said.after, found.after, whole) for said, found in pairs]
    peaks = [_off(said.peak, found.peak, whole) for said, found in pairs]
    worst = max(range(len(pairs)), key=lambda index: max(live[index], peaks[index]))
    top = max(found.peak for _, found in pairs)
    figures = {
        "actions": len(pairs),
        "worst error": max(live[worst], peaks[worst]),
        "at": str(pairs[worst][0].action),
        "worst of what stays": max(live),
        "peak's ratio": (whole + max(said.peak for said, _ in pairs)) / (whole + top),
        "peak's ratio by the graph alone": unmeasured.peak / (whole + top),
        "peak MiB": (whole + top) / 2**20,
        "of it state and batch": whole / (whole + top),
    }
    # (What an operation needs inside of itself, such as mse_loss, counts for much in small models.)
    judged = abs(figures["peak's ratio"] - 1) if setting.small else figures["worst error"]
    if judged > MEMORY:
        raise Wrong(f"the account is off by more than {MEMORY:.0%} of all bytes", **figures)
    return figures


def _off(said: int, found: int, whole: int) -> float:
    return abs(said - found) / (whole + found)


@attrs.frozen(eq=False)
class Configuration:
    one: Large
    program: pfeife.Program
    schedule: Schedule
    step: Callable[[], object]


def configurations(setting: Setting) -> list[Configuration]:
    """Ten: two models, 1F1B and GPipe, stages in turn, microbatches."""
    found = []
    chosen = [(1, "1f1b", 2), (1, "1f1b", 8), (4, "1f1b", 4), (4, "gpipe", 8), (2, "1f1b", 8)]
    for one in (language(setting), images(setting)):
        for stages, family, count in chosen:
            program, schedule = lowered(one, stages, schedule=family, microbatches=count)
            pipeline = LocalPipeline(program, schedule, [torch.device(setting.device)])
            state = pfeife.state_of(program, one.model)
            step = functools.partial(pipeline, state, one.microbatches[:count])
            found.append(Configuration(one, program, schedule, step))
    return found


def steps(setting: Setting) -> dict[str, Any]:
    """Predicted by the measured seconds of the stages' bodies, and how long the steps took."""
    machine = default_machine(torch.device(setting.device))
    tried = configurations(setting)
    names = [str(index) for index in range(len(tried))]
    first = [measure(one.program, repeats=5) for one in tried]
    times = in_turn(dict(zip(names, (one.step for one in tried), strict=True)), setting, 7)
    ratios, estimated = [], []
    for one, costs_of, name in zip(tried, first, names, strict=True):
        program = pfeife.annotate(costs_of)(one.program)
        ratios.append(sched.predict(program, one.schedule, machine).seconds / times[name])
        program = pfeife.annotate(estimate(one.program, machine))(one.program)
        estimated.append(sched.predict(program, one.schedule, machine).seconds)
    errors = [abs(ratio - 1) for ratio in ratios]
    figures = {
        "configurations": len(tried),
        "median error": statistics.median(errors),
        "ratios": ", ".join(f"{ratio:.3f}" for ratio in ratios),
        "ms": ", ".join(f"{1e3 * times[name]:.1f}" for name in names),
        "estimated over measured": ", ".join(
            f"{said / times[name]:.2f}" for said, name in zip(estimated, names, strict=True)
        ),
        "rank correlation of the roofline": _correlation(estimated, [times[n] for n in names]),
    }
    if figures["median error"] > STEPS and not setting.small:
        raise Wrong(f"steps are not predicted within {STEPS:.0%} by the median", **figures)
    return figures


def roofline(setting: Setting) -> dict[str, Any]:
    """The rank correlation of estimated and measured seconds, over the clusters of two models."""
    machine = default_machine(torch.device(setting.device))
    figures: dict[str, Any] = {"profile": machine.name}
    for name, one in (("GPT", language(setting)), ("UNet", images(setting))):
        clusters = clusters_of(one)
        said, found = estimate(clusters, machine).seconds, measure(clusters, repeats=5).seconds
        figures[f"{name}: correlation"] = _correlation(
            [said[node] for node in found], list(found.values())
        )
        figures[f"{name}: estimated over measured"] = sum(said.values()) / sum(found.values())
    return figures


def _correlation(said: Sequence[float], found: Sequence[float]) -> float:
    return float(spearmanr(said, found).statistic)


def memory_row(name: str, make: Callable[[Setting], Large], stages: int) -> Row:
    run = functools.partial(memory, make=make, stages=stages)
    return Row(f"memory of {name}, {stages} stages", run, 90)


ROWS = [
    memory_row("GPT", language, 1),
    memory_row("GPT", language, 4),
    Row("ten steps predicted", steps, 150),
    Row("costs beside the profiler", costs, 90),
    Row("the roofline beside measured costs", roofline, 90),
    memory_row("UNet", images, 4),
]
