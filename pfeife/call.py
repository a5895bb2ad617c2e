"""One call of a compiled step: from its arguments to results that autograd can use."""

import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from pfeife.capture import Captured
from pfeife.evaluate import Result
from pfeife.microbatch import cut, join
from pfeife.options import Options
from pfeife.plan import Plan, Schedule
from pfeife.program import STATE_ROLES, Program, Role
from pfeife.progress import Progress, Shown
from pfeife.runtime.distributed import DistributedPipeline
from pfeife.runtime.foreign import Borrowed
from pfeife.runtime.interpret import Observer, Watch
from pfeife.runtime.local import LocalPipeline


@attrs.frozen(eq=False)
class Compiled:
    """One graph at one shape, ready to run: what was captured, decided and built."""

    captured: Captured
    clusters: Program
    plan: Plan
    program: Program
    schedule: Schedule
    pipeline: LocalPipeline | DistributedPipeline
    digest: str  # of the program, the same on every rank
    borrowed: Borrowed | None = None

    @property
    def summary(self) -> str:
        """What was built, in a line."""
        ports = self.program.ports(Role.BATCH)
        rows = {p.shape[p.batch_dim] for p in ports if p.batch_dim is not None}
        stages, ranks = self.program.units, len(self.schedule.ranks) * self.program.replicas
        each = f" of {min(rows)} rows" if rows else ""
        count = self.schedule.microbatches * self.program.replicas
        return f"{stages} stages on {ranks} ranks, {count} microbatches{each}"


def run_step(
    compiled: Compiled,
    options: Options,
    args: Sequence[Any],
    seed: int = 0,
    show: Shown | None = None,
) -> list[torch.Tensor]:
    """One call of the compiled step: results in Dynamo's order, wired to autograd. `show` is
    given for the first one, which takes longest."""
    program = compiled.captured.program
    slots = {name: arg for name, arg in zip(compiled.captured.arguments, args, strict=True) if name}
    trained = {port.fqn for port in program.ports(Role.GRADIENT, Role.BATCH_GRADIENT)}
    leaves = {p.fqn: slots[p.name] for p in program.inputs if p.name in slots and p.fqn in trained}
    call = Call(compiled, options, slots, tuple(leaves), seed, show)
    if program.ports(Role.TANGENT) and torch.is_grad_enabled():
        return list(_PipelinedStep.apply(call, *leaves.values()))
    return list(call.forward())


class Call:
    """One call of the step, from its inputs to its gradients."""

    def __init__(
        self,
        compiled: Compiled,
        options: Options,
        slots: dict[str, Any],
        leaves: tuple[str, ...],
        seed: int = 0,
        show: Shown | None = None,
    ):
        self.seed = seed
        self.show, self.done = show, itertools.count(1)  # actions of rank 0 that are shown as done
        self.compiled, self.options, self.slots, self.leaves = compiled, options, slots, leaves
        self.program = compiled.captured.program
        self.inside = bool(self.program.ports(Role.LOSS))
        self.devices = {p.fqn: p.device for p in self.program.inputs}
        self.step: Any = None
        self.finished: Result | None = None
        self.versions: dict[str, int] = {}

    def forward(self) -> tuple[torch.Tensor, ...]:
        """Results in order. With the loss inside, or without gradients, the whole schedule."""
        state = {p.fqn: self.slots[p.name].detach() for p in self.program.ports(*STATE_ROLES)}
        trains = bool(self.program.ports(Role.TANGENT))
        tangents = None if self.inside or not trains else _later(self.program, self.options)
        self.step = self.compiled.pipeline.start(
            state, self._microbatches(), seed=self.seed, tangents=tangents
        )
        whole = self.inside or not trains
        self._run("first step" if whole else "first forward", self.step, backward=whole)
        result = self.step.result()
        if self.inside:
            self.finished, self.step = result, None
        parameters = self.program.ports(Role.PARAMETER)
        self.versions = {port.name: self._version(port.name) for port in parameters}
        with torch.no_grad():
            for port in self.program.ports(Role.BUFFER):
                if port.fqn in result.buffers:
                    self.slots[port.name].copy_(result.buffers[port.fqn])
        joined = {
            port.name: join(port, [outputs[port.fqn] for outputs in result.outputs], self.options)
            for port in self.program.ports(Role.OUTPUT)
        }
        if result.loss is not None:
            joined["loss"] = result.loss
        places = {port.name: port.device for port in self.program.outputs}
        return tuple(joined[name].to(places[name]) for name in self.compiled.captured.results)

    def _run(self, label: str, step: Any, **part: bool) -> None:
        """Runs a step or a part of it; the first one is shown."""
        if self.show is None:
            step.run(**part)
            return
        with self.show.phase(label) as phase:
            step.run(**part, watch=self._watch(phase.progress) if phase.progress else None)

    def _watch(self, progress: Progress) -> Watch:
        """Counts the actions of rank 0; of several replicas those of the first that begins."""
        total, begun = len(self.compiled.schedule.ranks[0]), itertools.count()

        def watch(rank: int) -> Observer:
            if rank or next(begun):
                return lambda action: None
            return lambda action: progress(next(self.done), total)

        return watch

    def _version(self, name: str) -> int:
        value = self.slots[name]
        return -1 if value.is_inference() else value._version

    def _microbatches(self) -> list[dict[str, torch.Tensor]]:
        count = self.options.microbatches
        parts = {
            port.fqn: self.slots[port.name].detach().chunk(count, port.batch_dim or 0)
            for port in self.program.ports(Role.BATCH)
        }
        return [{name: part[index] for name, part in parts.items()} for index in range(count)]

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The leaves' gradients for the given gradients of the results; None where this rank
        has none."""
        if self.inside:
            assert self.finished is not None
            at = self.compiled.captured.results.index("loss")
            scale = gradients[at]
            others = [i for i, g in enumerate(gradients) if g is not None and i != at]
            if others:
                raise RuntimeError(
                    f"result {others[0]} of the step received a gradient, but result {at} was "
                    "taken as the loss and only its gradient is computed: return the whole loss, "
                    'or say with loss= which result it is, or loss="outside" if none is'
                )
            if scale is None:  # nothing of what was differentiated came from the loss
                return [None] * len(self.leaves)
            return [None if g is None else g * scale for g in self._gradients(self.finished)]
        if self.step is None:
            raise RuntimeError(
                "backward ran a second time through one call of a pipelined step; its "
                "activations are gone: call the step again"
            )
        changed = [name for name, value in self.versions.items() if value != self._version(name)]
        if changed:
            raise RuntimeError(
                f"{changed[0]} was changed in place between the call and its backward"
            )
        step, self.step = self.step, None
        step.set_tangents(self._tangents(gradients))
        self._run("first backward", step, forward=False)
        return self._gradients(step.result(outputs=False))

    def _tangents(self, gradients: Sequence[torch.Tensor | None]) -> list[dict[str, torch.Tensor]]:
        count = self.options.microbatches
        tangents: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
        outputs = {port.name: port for port in self.program.ports(Role.OUTPUT)}
        given = dict(zip(self.compiled.captured.results, gradients, strict=True))
        for port in self.program.ports(Role.TANGENT):
            whole = given[port.fqn]
            for index, part in enumerate(cut(outputs[port.fqn], whole, count, self.options)):
                tangents[index][port.name] = part
        return tangents

    def _gradients(self, result: Result) -> list[torch.Tensor | None]:
        dims = {port.fqn: port.batch_dim or 0 for port in self.program.ports(Role.BATCH)}
        found: list[torch.Tensor | None] = []
        for name in self.leaves:
            if name in dims:
                parts = [one[name] for one in result.batch_gradients]
                found.append(torch.cat(parts, dims[name]))
            else:
                gradient = result.gradients.get(name)
                found.append(gradient if gradient is None else gradient.to(self.devices[name]))
        return found


def _later(program: Program, options: Options) -> list[dict[str, torch.Tensor]]:
    """Placeholders for the tangents that arrive with `backward`."""
    ports = program.ports(Role.TANGENT)
    zeros = {p.fqn: torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape) for p in ports}
    return [zeros] * options.microbatches


class _PipelinedStep(torch.autograd.Function):
    """A whole pipelined step as one node of the user's autograd graph."""

    @staticmethod
    def forward(ctx: Any, call: Call, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.forward()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a pipelined step has no second derivatives: backward without create_graph"
            )
        return (None, *ctx.call.backward(gradients))
