"""`step.report`: what was compiled of a step as one page."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pfeife import report
from pfeife.backend.building.compiled import Compiled
from pfeife.backend.shared.context import Context
from pfeife.data import files
from pfeife.data.advice import advice
from pfeife.data.optimizers import optimizer_name
from pfeife.data.timeline import MemoryCurve
from pfeife.frontend.watch.restore import torchs_generators
from pfeife.ir.evaluate import State
from pfeife.ir.flops import flops_of
from pfeife.report.extra import plotly
from pfeife.runtime import LocalPipeline
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.distributed.process_group import world_so_far
from pfeife.runtime.failure import CollectiveError
from pfeife.runtime.profile import profile, profile_memory

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class Measured(CollectiveError):
    """Ends a call that was to be measured, on all ranks, before it has written anything."""

    def __init__(self, compiled: Compiled, run: report.Run):
        super().__init__("the call was measured")
        self.compiled, self.run = compiled, run


def measure(compiled: Compiled, state: State, microbatches: Sequence[Any], **options: Any) -> None:
    """Runs a step twice, once to warm up, and raises what was measured (`Measured`; collective).
    Raises ValueError for a runtime of the caller's, or several replicas in one process."""
    pipeline = compiled.pipeline
    alone = isinstance(pipeline, LocalPipeline) and compiled.program.replicas == 1
    if not (alone or isinstance(pipeline, DistributedPipeline)):
        raise ValueError(
            "step.report with arguments measures a pipeline of Pfeife's own, in one process one "
            "without replicas; without arguments it shows what was predicted"
        )
    assert isinstance(pipeline, LocalPipeline | DistributedPipeline)
    # The first run allocates and compiles; the second one is what a step takes.
    profile(pipeline, state, microbatches, **options)
    timeline, memory = profile(pipeline, state, microbatches, **options), tuple[MemoryCurve, ...]()
    if isinstance(pipeline, DistributedPipeline):
        counted = compiled.target.optimizer if compiled.target else None
        optimizer = counted if isinstance(counted, torch.optim.Optimizer) else None
        memory = profile_memory(pipeline, state, microbatches, optimizer=optimizer, **options)
    raise Measured(compiled, report.Run(timeline, memory))


def write_report(
    path: str | os.PathLike[str],
    name: str,
    backend: Context,
    run: Run,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """See `PipelinedStep.report`."""
    plotly()  # on every rank, before anything is measured
    seen_call = measured(backend, run, args, kwargs) if args or kwargs else None
    if seen_call is None and not backend.compiled:
        raise ValueError(
            f"{name}.report: nothing was compiled yet; call the step first, or give the report "
            f"the arguments of a call: {name}.report({os.fspath(path)!r}, *batch)"
        )
    world = world_so_far()
    if not (world and world.rank):
        compiled, seen = (
            (seen_call.compiled, seen_call.run) if seen_call else (backend.compiled[-1], None)
        )
        files.write_text(Path(path), page_of(compiled, name, seen, _command(name, backend)))


def _short(name: str) -> str:
    """The name of a step as the function that made it knows it."""
    return name.rpartition("<locals>.")[2]


def _command(name: str, backend: Context) -> str:
    """How a step was compiled: with which options, where they are not those that hold anyway."""
    options = [text[:100] for text in backend.options.changed]
    return f"pfeife.compile({', '.join([_short(name), *options])})"


def measured(
    backend: Context, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Measured:
    """A call of a step as it was measured, which leaves nothing behind (collective)."""
    meter = backend.meter
    meter.measures = True
    try:
        # As a call that trains, and as if it had not been: the exception that ends it comes before
        # buffers or gradients are written.
        with torchs_generators(), torch.enable_grad():
            run(args, dict(kwargs))
    except Measured as found:
        return found
    finally:
        meter.measures = False
    raise AssertionError("the call was not measured")


def page_of(
    compiled: Compiled, name: str, measured: report.Run | None = None, command: str = ""
) -> str:
    """The page of what was compiled by a command, with what a step of it took where that was
    measured."""
    target = compiled.target
    assert target is not None
    predicted = report.expected(compiled.program, compiled.schedule, target)
    figures = compiled.clusters, compiled.program, predicted, target, "the step's schedule"
    forecast = report.forecast_of(compiled.plan, *figures)
    notes = [compiled.summary, f"Advice: {advice(forecast)}"]
    world = world_so_far()
    if measured is None:
        notes.append("Nothing was measured: give step.report the arguments of a call for that.")
    elif not measured.memory:
        notes.append(
            "Bytes were not measured: all ranks are threads of one process, whose memory nobody "
            "sees apart. Under torchrun they are."
        )
    if world and compiled.program.replicas > 1:
        notes.append("Timeline and memory are those of the first replica.")
    title, tried = _short(name), tuple(compiled.tried)
    kinds = (str(dtype).removeprefix("torch.") for dtype in flops_of(compiled.clusters))
    words = {
        "command": command,
        "precision": ", ".join(kinds),
        "optimizer": optimizer_name(target.optimizer) if target.optimizer else "none counted",
        "batch": forecast.samples or "",
        "sequence": forecast.tokens // forecast.samples if forecast.tokens else "",
        "microbatches": forecast.microbatches,
        "machine": forecast.machine,
    }
    about_words = {word: str(value) for word, value in words.items() if value != ""}
    limit = forecast.memory_limit
    about = report.About(title, forecast.machine, limit, tuple(notes), tried, about_words)
    return report.html(compiled.history, compiled.plan, predicted, measured, about)
