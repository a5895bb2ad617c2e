"""One call of a compiled step: from its arguments to results that autograd can use."""

import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from pfeife import _torch
from pfeife.backend.changed import write_changed
from pfeife.backend.loss_scale import Again, LossScale, loss_scale_of
from pfeife.backend.meter import Figures, Meter, figures_of
from pfeife.backend.options import Options
from pfeife.data.plan import Plan
from pfeife.data.progress import Progress, Shown
from pfeife.data.schedule import Schedule
from pfeife.frontend.answers import WrongAnswer
from pfeife.frontend.captured import Captured
from pfeife.frontend.microbatch import cut, join
from pfeife.ir.evaluate import Divisor, Result, State, divisors
from pfeife.ir.outline import read_by_backwards
from pfeife.ir.program import STATE_ROLES, Port, Program, Role
from pfeife.passes.compose import Recorded
from pfeife.runtime.distributed.elsewhere import arrived
from pfeife.runtime.distributed.foreign import Borrowed
from pfeife.runtime.distributed.gradients import is_ours
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.distributed.process_group import world_so_far
from pfeife.runtime.distributed.rank_zero import Sent
from pfeife.runtime.protocols import Pipeline
from pfeife.runtime.step import Observer, Watch

log = logging.getLogger("pfeife")
Slots = Mapping[str, Any]  # the call's arguments by the names of their ports


@attrs.frozen(eq=False, slots=False)
class Compiled:
    """One graph at one shape, ready to run: what was captured, decided and built. `history` has the
    programs on the way, `said` what has been logged."""

    captured: Captured
    clusters: Program
    plan: Plan
    program: Program
    schedule: Schedule
    pipeline: Pipeline
    digest: str  # of the program, the same on every rank
    borrowed: Borrowed | None = None
    history: tuple[Recorded, ...] = attrs.field(default=(), repr=False)
    said: set[str] = attrs.field(factory=set, repr=False)

    @property
    def summary(self) -> str:
        """What was built, in a line."""
        ports = self.program.ports(Role.BATCH)
        rows = {p.shape[p.batch_dim] for p in ports if p.batch_dim is not None}
        stages, ranks = self.program.units, len(self.schedule.ranks) * self.program.replicas
        each = f" of {min(rows)} rows" if rows else ""
        return f"{stages} stages on {ranks} ranks, {self.microbatches} microbatches{each}"

    @property
    def microbatches(self) -> int:
        """Into how many the batch of a call is cut, those of all replicas."""
        return self.schedule.microbatches * self.program.replicas

    @property
    def seconds(self) -> float:
        """What all microbatches compute, by the costs of the clusters."""
        return self.microbatches * sum(call.seconds or 0.0 for call in self.clusters.calls)

    @functools.cached_property
    def leaves(self) -> tuple[Port, ...]:
        """The inputs that get gradients here: batch inputs, and parameters whose gradients this
        process makes. The hooks of those of other ranks must not run here."""
        names = {port.fqn for port in self.program.ports(Role.BATCH_GRADIENT)}
        names |= self.pipeline.gradients
        ports = self.program.ports(*STATE_ROLES, Role.BATCH)
        return tuple(port for port in ports if port.fqn in names)

    @functools.cached_property
    def elsewhere(self) -> tuple[Port, ...]:
        """The parameters whose gradients other processes make."""
        mine = {port.fqn for port in self.leaves}
        trained = {port.fqn for port in self.program.ports(Role.GRADIENT)} - mine
        return tuple(port for port in self.program.ports(Role.PARAMETER) if port.fqn in trained)

    @functools.cached_property
    def loss_scale(self) -> LossScale | None:
        """The gradient that the loss will be given, where the backwards depend on it."""
        return loss_scale_of(self.program) if self.program.ports(Role.LOSS) else None

    @functools.cached_property
    def read_later(self) -> frozenset[str]:
        """The names of the input ports that a backward reads as the call has left them."""
        return read_by_backwards(self.program)


def run_step(
    compiled: Compiled,
    options: Options,
    args: Sequence[Any],
    meter: Meter,
    seed: int = 0,
    show: Shown | None = None,
    sent: Sent | None = None,
) -> list[torch.Tensor]:
    """One call of the compiled step: results in Dynamo's order, wired to autograd. `show` is
    given for the first one, which takes longest; `sent` has what rank 0 alone was given. The
    `meter` has been told that it begins."""
    captured = compiled.captured
    slots = {name: arg for name, arg in zip(captured.arguments, args, strict=True) if name}
    call = Call(compiled, options, meter, seed, show, sent)
    found = dict(zip(captured.results, _results(call, slots), strict=True))
    call.measured()
    own = {captured.carried[name]: slots[name] for name in captured.in_place}
    return list((found | own).values())


def _results(call: "Call", slots: Slots) -> Sequence[torch.Tensor]:
    compiled = call.compiled
    program = compiled.captured.program
    if not (program.ports(Role.TANGENT) and torch.is_grad_enabled()):
        return call.forward(slots)
    leaves = {p.fqn: slots[p.name] for p in compiled.leaves}
    if compiled.microbatches > 1 and "hooks" not in compiled.said:
        _warn_of_hooks(compiled, leaves)
    if not leaves:  # the results have a backward on every rank
        leaves[""] = torch.empty(0, requires_grad=True)
    function = _LossInside if program.ports(Role.LOSS) else _LossOutside
    call.leaves = tuple(leaves)
    results: tuple[torch.Tensor, ...] = function.apply(call, slots, *leaves.values())
    return results


def _warn_of_hooks(compiled: Compiled, leaves: Mapping[str, torch.Tensor]) -> None:
    parameters = (port.fqn for port in compiled.leaves if port.role == Role.PARAMETER)
    found = next(
        (n for n in parameters if any(not is_ours(h) for h in _torch.hooks_of(leaves[n]))), None
    )
    if found is not None:
        compiled.said.add("hooks")
        log.warning(
            "the hooks of parameter %s run once a call, on the gradient of all microbatches", found
        )


class Call:
    """One call of the step, from its inputs to its gradients.

    loss      forward                       in between              backward
    inside    all F and B: loss, gradients  autograd keeps these    gradients * what arrives
      (with a loss scale: `again` may run them once more, see `loss_scale`)
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
        self.again: Again | None = None
        self.elsewhere: list[torch.Tensor] = []  # parameters whose gradients other ranks have
        self.divided: dict[str, list[Divisor]] = {}
        self.shapes: dict[str, torch.Size] = {}

    def forward(self, slots: Slots) -> tuple[torch.Tensor, ...]:
        """Results in order. With the loss inside, or without gradients, the whole schedule."""
        trains = bool(self.program.ports(Role.TANGENT))
        if trains:
            self.elsewhere = [slots[port.name] for port in self.compiled.elsewhere]
        later = trains and not self.inside
        tangents = _later(self.program, self.count) if later else None
        state = {p.fqn: slots[p.name].detach() for p in self.program.ports(*STATE_ROLES)}
        microbatches, pipeline = self._microbatches(slots), self.compiled.pipeline
        scaled = {"scale": self.scale} if self.compiled.loss_scale else {}
        if scaled:
            self.again = self._kept(state, microbatches, slots)
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
        captured = self.compiled.captured
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
            self.meter.note(self.compiled, self.figures, self.seconds, built=built)
        elif not self.leaves:
            self.meter.forget()

    def _kept(self, state: State, microbatches: Sequence[Any], slots: Slots) -> Again:
        """What the step reads, before it writes any of it."""
        updated = {port.fqn for port in self.program.ports(Role.BUFFER_UPDATE)}
        before = {name: state[name].clone() if name in updated else state[name] for name in state}
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
            sent.parts(pipeline.reads({p: slots[p.name] for p in self._sent(slots)}))
        changed = self.compiled.captured.changed  # before what is read later
        whole = {
            p.fqn: slots[p.name].detach().clone() if p.name in changed else slots[p.name].detach()
            for p in self.program.ports(Role.BATCH)
        }
        dims = {p.fqn: p.batch_dim or 0 for p in self.program.ports(Role.BATCH)}
        if not isinstance(pipeline, DistributedPipeline):
            return _cut(whole, dims, self.count)
        return pipeline.known(_cut(whole, dims, len(pipeline.given)), sent is not None)

    def _sent(self, slots: Slots) -> Iterator[Port]:
        """The ports of what rank 0 alone was given."""
        ports = self.program.ports(Role.BATCH, Role.CONSTANT)
        return (port for port in ports if self.sent and slots[port.name] in self.sent)

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
            for index, part in enumerate(cut(outputs[port.fqn], whole, count, divided)):
                tangents[index][port.name] = part
        return tangents

    def backward(self) -> list[torch.Tensor | None]:
        """Runs the backwards; returns the gradients of the leaves."""
        self._run("first backward", forward=False)
        result = self.step.result(outputs=False)
        self.figures = figures_of(self.step)
        _tell(self.elsewhere, result.overflow)
        return self.gradients(result)

    def is_other(self, scale: float) -> bool:
        """Whether the loss is given another gradient than the one that the step has run with."""
        assert self.compiled.loss_scale is not None
        self.compiled.loss_scale.note(scale)
        return scale != self.scale

    def gradients(self, result: Result) -> list[torch.Tensor | None]:
        """The leaves' gradients; None for a leaf that is none of the step's."""
        dims = {port.fqn: port.batch_dim or 0 for port in self.program.ports(Role.BATCH)}
        devices = {port.fqn: port.device for port in self.program.inputs}
        found: list[torch.Tensor | None] = []
        for name in self.leaves:
            if name in dims:
                parts = _values(result.batch_gradients, name)
                found.append(torch.cat(parts, dims[name]) if len(parts) > 1 else parts[0])
            else:
                gradient = result.gradients.get(name)
                found.append(gradient if gradient is None else gradient.to(devices[name]))
        return found


def _cut(
    whole: Mapping[str, torch.Tensor], dims: Mapping[str, int], count: int
) -> list[dict[str, torch.Tensor]]:
    """A batch in so many microbatches."""
    if count == 1:  # also what has no dimensions
        return [dict(whole)]
    parts = {name: value.chunk(count, dims[name]) for name, value in whole.items()}
    return [{name: part[index] for name, part in parts.items()} for index in range(count)]


def _values(microbatches: Sequence[Mapping[str, torch.Tensor]], name: str) -> list[torch.Tensor]:
    """A result of those microbatches that have it here."""
    return [one[name] for one in microbatches if name in one]


def _later(program: Program, count: int) -> list[dict[str, torch.Tensor]]:
    """Placeholders for the tangents that arrive with `backward`."""
    ports = program.ports(Role.TANGENT)
    zeros = {p.fqn: torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape) for p in ports}
    return [zeros] * count


def _tell(elsewhere: Sequence[torch.Tensor], overflow: torch.Tensor | None) -> None:
    """Lets this rank see that other ranks have gradients of some parameters, and whether any is not
    finite: then the GradScalers of all ranks leave the step out, or none does."""
    world = world_so_far() if elsewhere else None
    if world is not None:
        arrived(elsewhere, world.ownership.norms, overflow is not None and bool(overflow))


Gradients = tuple[torch.Tensor | None, ...]


class _LossInside(torch.autograd.Function):
    """A whole step as one node of the user's autograd graph. Its gradients wait among autograd's
    saved tensors, which are freed by the backward."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, slots: Slots, *leaves: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        results = call.forward(slots)
        assert call.result is not None
        ctx.save_for_backward(*call.gradients(call.result))
        ctx.elsewhere, ctx.overflow = call.elsewhere, call.result.overflow
        ctx.call, call.result = call if call.again else None, None
        _wire(ctx, call.compiled.captured, results)
        return results

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> Gradients:
        _check_backward(ctx.captured.program)
        gradients, at = ctx.saved_tensors, ctx.captured.results.index("loss")
        others = [i for i, g in enumerate(given) if g is not None and i != at]
        if others:
            kept = ctx.captured.kept.get(ctx.captured.results[others[0]])
            what = f"attribute {kept.name}" if kept else f"result {others[0]}"
            raise RuntimeError(
                f"{what} of the step received a gradient, but result {at} was "
                "taken as the loss and only its gradient is computed: return the whole loss, "
                'or say with loss= which result it is, or loss="outside" if none is'
            )
        scale, overflow = given[at], ctx.overflow
        if scale is None:  # nothing of what was differentiated came from the loss
            return (None, None, *(None for _ in gradients))
        if ctx.call is None:
            # The gradients are those of the loss itself; what arrives for it is a factor of all.
            gradients = [None if g is None else g * scale for g in gradients]
        elif ctx.call.is_other(float(scale)):
            result = ctx.call.again.result(float(scale))
            gradients, overflow = ctx.call.gradients(result), result.overflow
        _tell(ctx.elsewhere, overflow)
        return (None, None, *gradients)


class _LossOutside(torch.autograd.Function):
    """A step whose backwards run when the gradients of its results arrive. What they read of the
    caller's tensors is saved, so that autograd sees if it was changed in place in between."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, slots: Slots, *leaves: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        results = call.forward(slots)
        ctx.save_for_backward(*(slots[name] for name in call.compiled.read_later))
        ctx.call = call
        _wire(ctx, call.compiled.captured, results)
        return results

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> Gradients:
        _check_backward(ctx.captured.program)
        call, ctx.call = ctx.call, None
        if call is None:
            ctx.saved_tensors  # noqa: B018  raises unless the graph was retained
            raise RuntimeError(
                "backward ran a second time through one call of a pipelined step; with the loss "
                "outside its activations are gone: call the step again"
            )
        if call.meter.asked:
            call.meter.begin()
        with call.step.preparing():
            ctx.saved_tensors  # noqa: B018  raises if one was changed in place
            tangents = call.tangents(given)
            call.step.compare(tangents, values=call.options.compare_batches)
            call.step.set_tangents(tangents)
        gradients = call.backward()
        call.measured()
        call.meter.tell()
        return (None, None, *gradients)


def _wire(ctx: Any, captured: Captured, results: Sequence[torch.Tensor]) -> None:
    ctx.captured = captured
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(results[index] for index in captured.detached))


def _check_backward(program: Program) -> None:
    """Raises RuntimeError for what eager's backward would do and that of a step cannot."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a pipelined step has no second derivatives: backward without create_graph"
        )
    for kind in sorted({port.device.type for port in program.inputs}):
        if torch.is_autocast_enabled(kind):
            raise RuntimeError(
                "backward was called under autocast, where eager would cast it too; a pipelined "
                "step's backward runs outside, as torch.amp asks for: call it after the autocast "
                f'block, or under torch.autocast("{kind}", enabled=False)'
            )
