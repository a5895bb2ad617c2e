"""The figures of each call that trains: a line of the log, and data for who asks for them."""

import itertools
import logging
import time
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch.utils.weak import WeakIdKeyDictionary

from pfeife.backend.building.compiled import Compiled
from pfeife.cost import default_machine, flops_of, memory_curves
from pfeife.data.figures import OnStep, StepFigures, mean_of
from pfeife.data.machine import Machine, Mesh
from pfeife.data.optimizers import Optimizer
from pfeife.ir.microbatch import rows_and_tokens
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.ir.sizes import resized
from pfeife.report.step_line import step_line
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.distributed.process_group import world_so_far

log = logging.getLogger("pfeife")
MOST_SIZES = 64  # of which figures of one program are kept
Figures = tuple[tuple[float, ...], tuple[int, ...]]  # of ranks: seconds of waiting, peaks


def figures_of(step: Any) -> Figures:
    """What a runtime's step has measured: nothing, if it does not."""
    return getattr(step, "waiting", ()), getattr(step, "peaks", ())


class Meter:
    """The clock of a backend's calls.

        call            seconds of the call
        loop            seconds outside
        backward        seconds of the call, where the loss is outside
        loop            seconds outside
        call            ...

    Calls that build, and those without gradients, have no figures; what is between these and the
    next one is outside. `every` so many calls rank 0 logs the means since the last line; `on_step`
    is given the figures of each, on the ranks that have one.
    """

    def __init__(
        self,
        every: int | None,
        on_step: OnStep | None,
        machine: Machine | None,
        optimizer: Optimizer | None,
    ):
        self.every, self.on_step = every, on_step
        self.machine, self.optimizer = machine, optimizer
        self.measures = False  # whether the next call is to be measured, and to end there
        # What is always the same, by what was compiled, and by the values of size ports.
        self.constants = WeakIdKeyDictionary()
        self.outside = 0.0  # seconds since the last figures
        self.ended: float | None = None  # when the last call or backward has
        self.numbers = itertools.count(1)  # of calls that train
        self.ready: list[StepFigures] = []  # that nobody has been told of
        self.since: list[StepFigures] = []  # the last line

    @property
    def asked(self) -> bool:
        """Whether anybody wants figures."""
        return self.every is not None or self.on_step is not None

    def begin(self) -> float:
        """A call or a backward begins; the moment, which `end` is given."""
        now = time.perf_counter()
        # Of the loop: loading, the optimizer, logging. It counts for the next call that has
        # figures.
        self.outside += now - self.ended if self.ended is not None else 0.0
        return now

    def end(self, begun: float) -> float:
        """It has ended; returns its seconds."""
        self.ended = time.perf_counter()
        return self.ended - begun

    def forget(self) -> float:
        """The call has no figures, or has had them; the seconds outside until now, which are not
        those of the next call."""
        outside, self.outside = self.outside, 0.0
        return outside

    def note(
        self,
        compiled: Compiled,
        measured: Figures,
        seconds: float,
        sizes: Mapping[str, int],
        *,
        built: bool,
    ) -> None:
        """A call that trains, with such values of size ports, has taken so many seconds; those in
        which it was `built` have no figures."""
        # Calls that build are counted, so that numbers are those of the loop, but their seconds say
        # nothing.
        step, outside = next(self.numbers), self.forget()
        if built:
            return
        at = tuple(sizes.values())
        by_sizes = self.constants.setdefault(compiled, {})
        if at not in by_sizes:
            if len(by_sizes) == MOST_SIZES:
                by_sizes.clear()
            by_sizes[at] = self._constant(compiled, sizes)
        waiting, peaks = measured
        self.ready.append(
            attrs.evolve(
                by_sizes[at],
                step=step,
                seconds=seconds,
                outside_seconds=outside,
                waiting_seconds=waiting,
                peak_bytes=peaks,
            )
        )

    def tell(self) -> None:
        """Where nothing waits for this rank: what others do with the figures may take its time, or
        fail."""
        while self.ready:
            figures = self.ready.pop(0)
            world = world_so_far()
            if self.every is not None and not (world and world.rank):
                self.since.append(figures)
                if figures.step % self.every == 0:
                    log.info("%s", step_line(mean_of(self.since)))
                    self.since.clear()
            if self.on_step is not None:
                self.on_step(figures)

    def _constant(self, compiled: Compiled, sizes: Mapping[str, int]) -> StepFigures:
        """What is the same in every call of what was compiled, at such sizes."""
        program, count = resized(compiled.program, sizes), compiled.microbatches
        times = count * program.members  # each of whom computes a part
        device = next((p.device for p in program.ports(Role.PARAMETER)), torch.device("cpu"))
        machine = self.machine or default_machine(device)
        # Of the program as captured: what is computed again to save memory is no work of the model.
        flops = flops_of(resized(compiled.captured.program, sizes))
        peaks = self._peaks(compiled, program)
        at_peak = sum(number / machine.peak_of(dtype) for dtype, number in flops.items())
        rows, tokens = rows_and_tokens(program)
        return StepFigures(
            step=0,
            seconds=0.0,
            outside_seconds=0.0,
            samples=count * rows,
            tokens=count * tokens,
            flops=times * sum(flops.values()),
            peak_seconds=times * at_peak / len(peaks),
            machine=machine.name,
            account_bytes=peaks,
        )

    def _peaks(self, compiled: Compiled, program: Program) -> tuple[int, ...]:
        """Bytes of every rank of the world at its peak, by the account."""
        pipeline = compiled.pipeline
        ranks = len(compiled.schedule.ranks)
        mesh, apart = Mesh(ranks, program.replicas, members=program.members), False
        if isinstance(pipeline, DistributedPipeline):
            mesh, apart = pipeline.mesh, pipeline.apart
        # Where replicas share the parameters out, each of them keeps another part of the state.
        shared_out = any(reduction.owner is not None for reduction in program.reductions)
        curves = [
            memory_curves(
                program, compiled.schedule, optimizer=self.optimizer, replica=replica, apart=apart
            )
            for replica in range(mesh.replicas if shared_out else 1)
        ]
        places = (mesh.place(rank) for rank in range(mesh.size))
        return tuple(curves[replica % len(curves)][rank].peak for replica, rank in places)
