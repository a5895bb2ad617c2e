"""One call of a compiled step: from its arguments to results and gradients."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from pfeife.backend.building.compiled import Compiled
from pfeife.backend.building.loss_scale import Again, Gradients
from pfeife.backend.calls.inplace_inputs import write_changed
from pfeife.backend.settings.options import Options
from pfeife.backend.shared.meter import Figures, Meter, figures_of
from pfeife.backend.shared.reporting import measure
from pfeife.data.progress import Progress, Shown
from pfeife.frontend.microbatch import cut, join
from pfeife.frontend.watch.value_guards import WrongAnswer
from pfeife.ir.combine import Divisor, divisors
from pfeife.ir.evaluate import Result, State
from pfeife.ir.parts import STATE_ROLES, Port, Role
from pfeife.ir.program import Program
from pfeife.runtime.distributed.batches.rank_zero import Sent
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.distributed.process_group import world_so_far
from pfeife.runtime.distributed.state.remote_gradients import arrived
from pfeife.runtime.step import Observer, Watch

Slots = Mapping[str, Any]  # the call's arguments by the names of their ports
Results = tuple[torch.Tensor, ...]


@attrs.frozen(eq=False)
class Call:
    """What is asked of a compiled step: `leaves` get gradients; `show` is given for the first call,
    `sent` has what rank 0 alone was given of the batch."""

    compiled: Compiled
    options: Options
    meter: Meter
    seed: int = 0
    show: Shown | None = None
    sent: Sent | None = None
    leaves: tuple[str, ...] = ()
    done: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))  # actions that are shown

    @property
    def program(self) -> Program:
        """The program that is called."""
        return self.compiled.captured.program

    @property
    def inside(self) -> bool:
        """Whether the loss is inside, so that backwards run with the call."""
        return bool(self.program.ports(Role.LOSS))

    @property
    def scale(self) -> float:
        """The gradient that the loss is expected to be given."""
        scale = self.compiled.loss_scale
        return scale.value if scale else 1.0


@attrs.frozen(eq=False)
class Ran:
    """What a call has left when it returns, for its backward.

    loss      forward                       in between              backward
    inside    all F and B: loss, gradients  autograd keeps these    gradients * what arrives
      (with a loss scale: `run_again` may run them once more, see `loss_scale`)
    outside   all F: results                activations stay        tangents, all B: gradients
    """

    call: Call
    scale: float  # the gradient of the loss that it ran with
    saved: Gradients | None  # by autograd, of a step that may run again
    elsewhere: Sequence[torch.Tensor]  # parameters whose gradients other ranks have
    step: Any  # of the runtime, if its backwards are to run
    figures: Figures | None  # of the step, if all of it has run
    sizes: Mapping[str, int]  # the values of size ports, by their names
    places: Mapping[str, torch.device]  # of the inputs
    shapes: Mapping[str, torch.Size]  # of the results
    divided: Mapping[str, list[Divisor]]  # by what the microbatches of a result are divided
    seconds: list[float] = attrs.field(factory=list)  # of the call, and of its backward

    def measured(self, begun: float, figures: Figures | None) -> None:
        """The call, or the backward, that has begun then has ended; `figures` are those of the step
        if all has run."""
        call = self.call
        if not call.meter.asked:
            return
        self.seconds.append(call.meter.end(begun))
        if call.leaves and figures is not None:
            built = call.show is not None
            call.meter.note(call.compiled, figures, sum(self.seconds), self.sizes, built=built)
        elif not call.leaves:
            call.meter.forget()

    def tangents(self, gradients: Sequence[torch.Tensor | None]) -> list[dict[str, torch.Tensor]]:
        """The gradients of the results as those of the microbatches' outputs."""
        captured, count = self.call.compiled.captured, self.call.compiled.microbatches
        tangents: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
        outputs = {port.name: port for port in captured.program.ports(Role.OUTPUT)}
        gradient_of = dict(zip(captured.results, gradients, strict=True))
        for port in captured.program.ports(Role.TANGENT):
            whole, divided = gradient_of[port.fqn], self.divided[port.fqn]
            if whole is None and port.sized_by_data:
                whole = torch.zeros(self.shapes[port.fqn], dtype=port.dtype, device=port.device)
            parts = cut(outputs[port.fqn], whole, count, divided, self.sizes)
            for index, part in enumerate(parts):
                tangents[index][port.name] = part
        return tangents

    def backward(self) -> tuple[list[torch.Tensor | None], Figures]:
        """Runs the backwards; returns the gradients of the leaves, and the step's figures."""
        _run(self.call, self.step, "first backward", forward=False)
        result = self.step.result(outputs=False)
        tell(self.elsewhere, result.overflow)
        return self.gradients(result), figures_of(self.step)

    def is_other(self, scale: float) -> bool:
        """Whether the loss is given another gradient than the one that the step has run with."""
        assert self.call.compiled.loss_scale is not None and self.saved is not None
        self.call.compiled.loss_scale.note(scale)
        return scale != self.scale or self.saved.dropped

    def run_again(self, scale: float) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
        """The leaves' gradients with another gradient of the loss, instead of those that autograd
        has saved, and whether some rank's are not finite (collective)."""
        assert self.saved is not None
        self.saved.drop()
        result = self.saved.again.result(scale)
        return self.gradients(result), result.overflow

    def gradients(self, result: Result) -> list[torch.Tensor | None]:
        """The leaves' gradients, where these are; None for a leaf that is none of the step's."""
        program, pipeline = self.call.program, self.call.compiled.pipeline
        dims = {port.fqn: port.batch_dim or 0 for port in program.ports(Role.BATCH)}
        gradients: list[torch.Tensor | None] = []
        for name in self.call.leaves:
            gradient: torch.Tensor | None
            if name in dims:
                parts = _values(result.batch_gradients, name)
                gradient = torch.cat(parts, dims[name]) if len(parts) > 1 else parts[0]
            else:
                gradient = result.gradients.get(name)
                if gradient is None and name in pipeline.gradients:
                    raise ValueError(f"the runtime's step has no gradient of {name}")
            gradients.append(gradient if gradient is None else gradient.to(self.places[name]))
        return gradients


def forward(call: Call, slots: Slots) -> tuple[Ran, Result, Results, Again | None]:
    """Runs a call: with the loss inside, or without gradients, the whole schedule. What it leaves,
    what the runtime gives (gradients included), the step's results in their order, and what runs
    the step again, where its gradients depend on that of the loss."""
    program, captured = call.program, call.compiled.captured
    pipeline, count = call.compiled.pipeline, call.compiled.microbatches
    trains = bool(program.ports(Role.TANGENT))
    # Without the loss nobody knows the first gradient, so the backwards wait for it.
    later = trains and not call.inside  # the backwards, when tangents arrive
    elsewhere = [slots[port.name] for port in call.compiled.elsewhere] if trains else []
    values = [slots[name] if name else None for name in captured.arguments]
    # With batches of replicas a rank is given the microbatches of its own alone.
    parts = len(pipeline.given) if isinstance(pipeline, DistributedPipeline) else count
    sizes = captured.sizes(values, parts)
    tangents = _later(program, count, sizes) if later else None
    state = {p.fqn: slots[p.name].detach() for p in program.ports(*STATE_ROLES)}
    microbatches = _microbatches(call, slots)
    scaled = {"scale": call.scale} if call.compiled.loss_scale else {}
    scale = call.scale  # before another call changes it
    # Before the step runs: it writes to buffers and arguments, and a second run has to read what
    # the first one read.
    again = _again(call, state, microbatches, slots) if call.compiled.loss_scale else None
    if call.meter.measures:
        measure(call.compiled, state, microbatches, seed=call.seed, tangents=tangents, **scaled)
    step = pipeline.start(state, microbatches, seed=call.seed, tangents=tangents, **scaled)
    _run(call, step, "first forward" if later else "first step", backward=not later)
    result = step.result()
    # A trace has assumed what tensors answer to the step's Python. If they do not, another trace
    # takes the call, and nothing of this one may be seen.
    _check_answers(call, result)
    with torch.no_grad():
        for port in program.ports(Role.BUFFER):
            if port.fqn in result.buffers and port.name not in captured.carried:
                slots[port.name].copy_(result.buffers[port.fqn])
    outputs = program.ports(Role.OUTPUT)
    divided = {port.name: _divided(program, port, microbatches) for port in outputs}
    joined = {
        port.name: join(port, _values(result.outputs, port.fqn), divided[port.name])
        for port in outputs
    }
    if result.loss is not None:
        joined["loss"] = result.loss
    # After the buffers, and before results are handed out, which may be the same memory.
    write_changed(captured, slots, joined)
    device_of = {port.name: port.device for port in program.outputs}
    inputs = program.ports(*STATE_ROLES, Role.BATCH)
    ran = Ran(
        call,
        scale,
        Gradients() if again else None,
        elsewhere,
        step if later else None,
        None if later else figures_of(step),
        sizes,
        {port.fqn: slots[port.name].device for port in inputs},
        {name: value.shape for name, value in joined.items()},
        divided,
    )
    results = tuple(joined[name].to(device_of[name]) for name in captured.results)
    return ran, result, results, again


def _again(call: Call, state: State, microbatches: Sequence[Any], slots: Slots) -> Again:
    """What the step reads, before it writes any of it."""
    program = call.program
    updated = {port.fqn for port in program.ports(Role.BUFFER_UPDATE)}
    world = world_so_far()
    here = {
        port.fqn
        for port in program.ports(Role.BUFFER)
        if not (world and world.ownership.foreign.lacks(slots[port.name]))
    }
    before = {
        name: value.clone() if name in updated & here else value for name, value in state.items()
    }
    copied = updated | set(call.compiled.captured.changed)
    ports = program.ports(*STATE_ROLES, Role.BATCH)
    # What the step itself changes was copied; all else must be as it was when it runs again.
    read = tuple(port for port in ports if not {port.fqn, port.name} & copied)
    return Again.of(call.compiled.pipeline, before, microbatches, call.seed, read, slots)


def _check_answers(call: Call, result: Result) -> None:
    """Raises WrongAnswer, on all ranks, before anything is written."""
    ports = {port.name: port.fqn for port in call.program.outputs}
    for index, name in enumerate(call.compiled.captured.flags):
        if any(bool(outputs[ports[name]]) for outputs in result.outputs):
            raise WrongAnswer(index)


def _run(call: Call, step: Any, label: str, **part: bool) -> None:
    """Runs a step or a part of it; the first one is shown."""
    if call.show is None:
        step.run(**part)
        return
    with call.show.phase(label) as phase:
        step.run(**part, watch=_watch(call, phase.progress) if phase.progress else None)


def _watch(call: Call, progress: Progress) -> Watch:
    """Counts the actions of rank 0; of several replicas those of the first that starts."""
    total, started = len(call.compiled.schedule.ranks[0]), itertools.count()

    def watch(rank: int) -> Observer:
        if rank or next(started):
            return lambda action: None
        return lambda action: progress(next(call.done), total)

    return watch


def _microbatches(call: Call, slots: Slots) -> list[Any]:
    """Those of the whole step; of which this process is not given, what it knows of them."""
    program, pipeline, sent = call.program, call.compiled.pipeline, call.sent
    if sent and isinstance(pipeline, DistributedPipeline):
        # Rank 0 sends the rows that a rank reads, and no others.
        ports = program.ports(Role.BATCH, Role.CONSTANT)
        sent.parts(pipeline.reads({p: slots[p.name] for p in ports if slots[p.name] in sent}))
    changed = call.compiled.captured.changed  # before what is read later
    whole = {
        p.fqn: slots[p.name].detach().clone() if p.name in changed else slots[p.name].detach()
        for p in program.ports(Role.BATCH)
    }
    dims = {p.fqn: p.batch_dim or 0 for p in program.ports(Role.BATCH)}
    sizes = {p.name: slots[p.name] for p in program.ports(Role.SIZE) if p.name in slots}
    if not isinstance(pipeline, DistributedPipeline):
        return _cut(whole, dims, call.compiled.microbatches, sizes)
    return pipeline.known(_cut(whole, dims, len(pipeline.given), sizes), sent is not None)


def _divided(program: Program, port: Port, microbatches: Sequence[Any]) -> list[Divisor]:
    """What the microbatches of a result without rows are divided by."""
    if port.batch_dim is not None or port.reduction == "last":
        return []
    return divisors(program, port, microbatches)


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
    return [outputs[name] for outputs in microbatches if name in outputs]


def _later(program: Program, count: int, sizes: Mapping[str, int]) -> list[dict[str, torch.Tensor]]:
    """Placeholders for the tangents that arrive with `backward`."""
    # Only shapes and types are looked at until the real ones come: they take no memory.
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
    world = world_so_far()
    if world is not None:
        arrived(elsewhere, world.ownership.norms, overflow is not None and bool(overflow))
