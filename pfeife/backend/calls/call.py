"""One call of a compiled step: from its arguments to results and gradients."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from pfeife.backend.building.compiled import Compiled
from pfeife.backend.calls.inplace_inputs import write_changed
from pfeife.backend.calls.loss_scale import Again, Gradients
from pfeife.backend.calls.meter import Figures, Meter, figures_of
from pfeife.backend.reporting import measure
from pfeife.backend.settings.options import Options
from pfeife.data.progress import Progress, Shown
from pfeife.frontend.microbatch import cut, join
from pfeife.frontend.trace.value_guards import WrongAnswer
from pfeife.ir.evaluate import Divisor, Result, State, divisors
from pfeife.ir.parts import STATE_ROLES, Port, Role
from pfeife.ir.program import Program
from pfeife.runtime.distributed.batches.rank_zero import Sent
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.distributed.process_group import world_so_far
from pfeife.runtime.distributed.state.remote_gradients import arrived
from pfeife.runtime.step import Observer, Watch

Slots = Mapping[str, Any]  # the call's arguments by the names of their ports


class Call:
    """One call of the step, from its inputs to its gradients.

    loss      forward                       in between              backward
    inside    all F and B: loss, gradients  autograd keeps these    gradients * what arrives
      (with a loss scale: `run_again` may run them once more, see `loss_scale`)
    outside   all F: results                activations stay        tangents, all B: gradients
    """

    def __init__(
        self,
        compiled: Compiled,
        options: Options,
        meter: Meter,
        seed: int = 0,
        show: Shown | None = None,
        sent: Sent | None = None,
    ):
        self.meter, self.seconds = meter, 0.0
        self.seed, self.sent = seed, sent
        self.show, self.done = show, itertools.count(1)  # actions of rank 0 that are shown as done
        self.compiled, self.options = compiled, options
        self.leaves: tuple[str, ...] = ()  # that get gradients
        self.count = compiled.microbatches
        self.program = compiled.captured.program
        self.inside = bool(self.program.ports(Role.LOSS))
        self.step: Any = None
        self.figures: Figures | None = None  # of the step once all of it has run
        self.result: Result | None = None
        self.scale = compiled.loss_scale.value if compiled.loss_scale else 1.0
        # What autograd saves of a step that may run again.
        self.kept = Gradients() if compiled.loss_scale else None
        self.elsewhere: list[torch.Tensor] = []  # parameters whose gradients other ranks have
        self.divided: dict[str, list[Divisor]] = {}
        self.shapes: dict[str, torch.Size] = {}
        self.sizes: Mapping[str, int] = {}  # the values of size ports, by their names
        self.places: dict[str, torch.device] = {}  # of the inputs

    def forward(self, slots: Slots) -> tuple[torch.Tensor, ...]:
        """Results in order. With the loss inside, or without gradients, the whole schedule."""
        trains = bool(self.program.ports(Role.TANGENT))
        if trains:
            self.elsewhere = [slots[port.name] for port in self.compiled.elsewhere]
        ports = self.program.ports(*STATE_ROLES, Role.BATCH)
        self.places = {port.fqn: slots[port.name].device for port in ports}
        later = trains and not self.inside
        captured = self.compiled.captured
        given = [slots[name] if name else None for name in captured.arguments]
        pipeline = self.compiled.pipeline
        count = len(pipeline.given) if isinstance(pipeline, DistributedPipeline) else self.count
        self.sizes = captured.sizes(given, count)
        tangents = _later(self.program, self.count, self.sizes) if later else None
        state = {p.fqn: slots[p.name].detach() for p in self.program.ports(*STATE_ROLES)}
        microbatches = self._microbatches(slots)
        self.sent = None  # which has the whole batch
        scaled = {"scale": self.scale} if self.compiled.loss_scale else {}
        if self.kept:
            self.kept.given = self._kept(state, microbatches, slots)
        if self.meter.measures:
            measure(self.compiled, state, microbatches, seed=self.seed, tangents=tangents, **scaled)
        self.step = pipeline.start(state, microbatches, seed=self.seed, tangents=tangents, **scaled)
        self._run("first forward" if later else "first step", backward=not later)
        result = self.step.result()
        self._check_answers(result)
        if not later:
            self.figures = figures_of(self.step)
            self.step, self.result = None, result
        with torch.no_grad():
            for port in self.program.ports(Role.BUFFER):
                if port.fqn in result.buffers and port.name not in self.compiled.captured.carried:
                    slots[port.name].copy_(result.buffers[port.fqn])
        outputs = self.program.ports(Role.OUTPUT)
        self.divided = {port.name: self._divided(port, microbatches) for port in outputs}
        joined = {
            port.name: join(port, _values(result.outputs, port.fqn), self.divided[port.name])
            for port in outputs
        }
        if result.loss is not None:
            joined["loss"] = result.loss
        self.shapes = {name: value.shape for name, value in joined.items()}
        write_changed(captured, slots, joined)
        places = {port.name: port.device for port in self.program.outputs}
        return tuple(joined[name].to(places[name]) for name in captured.results)

    def measured(self) -> None:
        """The call, or the backward, has ended."""
        if not self.meter.asked:
            return
        self.seconds += self.meter.end()
        if self.leaves and self.figures is not None:
            built = self.show is not None
            self.meter.note(self.compiled, self.figures, self.seconds, self.sizes, built=built)
        elif not self.leaves:
            self.meter.forget()

    def _kept(self, state: State, microbatches: Sequence[Any], slots: Slots) -> Again:
        """What the step reads, before it writes any of it."""
        updated = {port.fqn for port in self.program.ports(Role.BUFFER_UPDATE)}
        world = world_so_far()
        here = {
            port.fqn
            for port in self.program.ports(Role.BUFFER)
            if not (world and world.ownership.foreign.lacks(slots[port.name]))
        }
        before = {n: one.clone() if n in updated & here else one for n, one in state.items()}
        copied = updated | set(self.compiled.captured.changed)
        ports = self.program.ports(*STATE_ROLES, Role.BATCH)
        ports = tuple(one for one in ports if not {one.fqn, one.name} & copied)
        pipeline = self.compiled.pipeline
        return Again.of(pipeline, before, microbatches, self.seed, ports, slots)

    def _check_answers(self, result: Result) -> None:
        """Raises WrongAnswer, on all ranks, before anything is written."""
        ports = {port.name: port.fqn for port in self.program.outputs}
        for index, name in enumerate(self.compiled.captured.flags):
            if any(bool(one[ports[name]]) for one in result.outputs):
                raise WrongAnswer(index)

    def _run(self, label: str, **part: bool) -> None:
        """Runs the step or a part of it; the first one is shown."""
        if self.show is None:
            self.step.run(**part)
            return
        with self.show.phase(label) as phase:
            self.step.run(**part, watch=self._watch(phase.progress) if phase.progress else None)

    def _watch(self, progress: Progress) -> Watch:
        """Counts the actions of rank 0; of several replicas those of the first that starts."""
        total, started = len(self.compiled.schedule.ranks[0]), itertools.count()

        def watch(rank: int) -> Observer:
            if rank or next(started):
                return lambda action: None
            return lambda action: progress(next(self.done), total)

        return watch

    def _microbatches(self, slots: Slots) -> list[Any]:
        """Those of the whole step; of which this process is not given, what it knows of them."""
        pipeline, sent = self.compiled.pipeline, self.sent
        if sent and isinstance(pipeline, DistributedPipeline):
            sent.parts(pipeline.reads({p: slots[p.name] for p in self._sent(sent, slots)}))
        changed = self.compiled.captured.changed  # before what is read later
        whole = {
            p.fqn: slots[p.name].detach().clone() if p.name in changed else slots[p.name].detach()
            for p in self.program.ports(Role.BATCH)
        }
        dims = {p.fqn: p.batch_dim or 0 for p in self.program.ports(Role.BATCH)}
        sizes = {p.name: slots[p.name] for p in self.program.ports(Role.SIZE) if p.name in slots}
        if not isinstance(pipeline, DistributedPipeline):
            return _cut(whole, dims, self.count, sizes)
        return pipeline.known(_cut(whole, dims, len(pipeline.given), sizes), sent is not None)

    def _sent(self, sent: Sent, slots: Slots) -> Iterator[Port]:
        """The ports of what rank 0 alone was given."""
        ports = self.program.ports(Role.BATCH, Role.CONSTANT)
        return (port for port in ports if slots[port.name] in sent)

    def _divided(self, port: Port, microbatches: Sequence[Any]) -> list[Divisor]:
        """What the microbatches of a result without rows are divided by."""
        if port.batch_dim is not None or port.reduction == "last":
            return []
        return divisors(self.program, port, microbatches)

    def tangents(self, gradients: Sequence[torch.Tensor | None]) -> list[dict[str, torch.Tensor]]:
        """The gradients of the results as those of the microbatches' outputs."""
        count = self.count
        tangents: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
        outputs = {port.name: port for port in self.program.ports(Role.OUTPUT)}
        given = dict(zip(self.compiled.captured.results, gradients, strict=True))
        for port in self.program.ports(Role.TANGENT):
            whole, divided = given[port.fqn], self.divided[port.fqn]
            if whole is None and port.sized_by_data:
                whole = torch.zeros(self.shapes[port.fqn], dtype=port.dtype, device=port.device)
            parts = cut(outputs[port.fqn], whole, count, divided, self.sizes)
            for index, part in enumerate(parts):
                tangents[index][port.name] = part
        return tangents

    def backward(self) -> list[torch.Tensor | None]:
        """Runs the backwards; returns the gradients of the leaves."""
        self._run("first backward", forward=False)
        result = self.step.result(outputs=False)
        self.figures = figures_of(self.step)
        tell(self.elsewhere, result.overflow)
        return self.gradients(result)

    def is_other(self, scale: float) -> bool:
        """Whether the loss is given another gradient than the one that the step has run with."""
        assert self.compiled.loss_scale is not None and self.kept is not None
        self.compiled.loss_scale.note(scale)
        return scale != self.scale or self.kept.dropped

    def run_again(self, scale: float) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
        """The leaves' gradients with another gradient of the loss, instead of those that autograd
        has saved, and whether some rank's are not finite (collective)."""
        assert self.kept is not None
        self.kept.drop()
        result = self.kept.again.result(scale)
        return self.gradients(result), result.overflow

    def gradients(self, result: Result) -> list[torch.Tensor | None]:
        """The leaves' gradients, where these are; None for a leaf that is none of the step's."""
        dims = {port.fqn: port.batch_dim or 0 for port in self.program.ports(Role.BATCH)}
        found: list[torch.Tensor | None] = []
        for name in self.leaves:
            gradient: torch.Tensor | None
            if name in dims:
                parts = _values(result.batch_gradients, name)
                gradient = torch.cat(parts, dims[name]) if len(parts) > 1 else parts[0]
            else:
                gradient = result.gradients.get(name)
                if gradient is None and name in self.compiled.pipeline.gradients:
                    raise ValueError(f"the runtime's step has no gradient of {name}")
            found.append(gradient if gradient is None else gradient.to(self.places[name]))
        return found


def _cut(
    whole: Mapping[str, torch.Tensor], dims: Mapping[str, int], count: int, sizes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """A batch in so many microbatches, each with the sizes that are not those of its tensors."""
    if count == 1:  # also what has no dimensions
        return [{**whole, **sizes}]
    parts = {name: value.chunk(count, dims[name]) for name, value in whole.items()}
    each = ({name: part[index] for name, part in parts.items()} for index in range(count))
    return [{**part, **sizes} for part in each]


def _values(microbatches: Sequence[Mapping[str, torch.Tensor]], name: str) -> list[torch.Tensor]:
    """A result of those microbatches that have it here."""
    return [one[name] for one in microbatches if name in one]


def _later(program: Program, count: int, sizes: Mapping[str, int]) -> list[dict[str, torch.Tensor]]:
    """Placeholders for the tangents that arrive with `backward`."""
    zeros = {
        port.fqn: torch.zeros((), dtype=port.dtype, device=port.device).expand(port.shape_at(sizes))
        for port in program.ports(Role.TANGENT)
    }
    return [zeros] * count


@contextlib.contextmanager
def as_backward() -> Iterator[None]:
    """While autograd is at a step, which other ranks tell from before and after that."""
    world = world_so_far()
    with world.service.changing("backwards", ()) if world else contextlib.nullcontext():
        yield


def tell(elsewhere: Sequence[torch.Tensor], overflow: torch.Tensor | None) -> None:
    """Lets this rank see that other ranks have gradients of some parameters, and whether any is not
    finite: then the GradScalers of all ranks leave the step out, or none does."""
    world = world_so_far() if elsewhere else None
    if world is not None:
        arrived(elsewhere, world.ownership.norms, overflow is not None and bool(overflow))
