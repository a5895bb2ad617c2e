"""A traced step beside eager, on other rows than those that it was traced with.

What a trace froze (a length that was read from data, a choice among kernels) shows in other rows. A
whole microbatch is computed twice on this rank, with its gradients.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pfeife import _torch
from pfeife.frontend.captured import Captured
from pfeife.frontend.checks.check_capture import Runs, Values
from pfeife.frontend.checks.deterministic import Draws, Expected, Unseeded, close
from pfeife.frontend.checks.restore import values_kept
from pfeife.frontend.forward import Forward
from pfeife.frontend.trace.value_guards import fails_elsewhere
from pfeife.ir.nodes import source_line
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.ir.sizes import with_sizes

log = logging.getLogger("pfeife")
Named = Mapping[str, torch.Tensor]  # by the names of ports


def check_traced(step: Forward, captured: Captured, args: Sequence[Any]) -> None:
    """Raises ValueError if the program gives other results, gradients or buffers than the step
    itself, beyond rounding, on the last microbatch of a call with these arguments.

    Left out is a step that draws what has no expected value.
    """
    runs = Runs(step, captured, args)
    values = runs.part(_count(runs) - 1)
    try:
        results = _by_program(captured.program, runs, values)
        wrong = [at for at, name in enumerate(captured.flags) if results[name]]
        if wrong:
            raise ValueError(
                "the step was traced on the first microbatch of a call, and does something else on "
                f"the last one: {step.asked[wrong[0]]} asks for the value of a tensor; compute it "
                "with tensors (torch.where)"
            )
        expected = _by_eager(runs, values)
    except Draws as draws:
        log.debug("a traced step is not checked, since it draws by %s", draws)
        return
    for name, value in expected.items():
        if not _same(results[name], value):
            raise ValueError(
                "the step was traced on the first microbatch of a call, and what was traced gives "
                f"another {name} on the last one than the step itself: it depends on the values "
                "of its arguments in a way that no trace has (a length, a branch, a number that "
                f"is read from a tensor{_at(step.asked)})"
            )


def _at(lines: Sequence[str]) -> str:
    return f": {', '.join(dict.fromkeys(lines))}" if lines else ""


def _count(runs: Runs) -> int:
    """How many microbatches a call has."""
    sizes = [
        value.shape[port.batch_dim] // port.shape[port.batch_dim]
        for value, port in zip(runs.args, runs.ports, strict=True)
        if port is not None and port.batch_dim is not None
    ]
    return min(sizes, default=1)


def _copies(runs: Runs, values: Values) -> Values:
    """The arguments as leaves of autograd; what the step changes in place are copies."""
    program, changed = runs.captured.program, runs.captured.changed
    trained = {port.fqn for port in program.ports(Role.GRADIENT, Role.BATCH_GRADIENT)}
    return [
        value
        if port is None
        else (
            value.detach().clone()
            if port.role == Role.BUFFER or port.name in changed
            else value.detach()
        ).requires_grad_(port.fqn in trained)
        for value, port in zip(values, runs.ports, strict=True)
    ]


def _state(runs: Runs) -> list[torch.Tensor]:
    """The buffers themselves: a part that is computed again in the backward (a checkpoint) finds
    these in their places, and writes to them."""
    pairs = zip(runs.args, runs.ports, strict=True)
    return [value for value, port in pairs if port is not None and port.role == Role.BUFFER]


def _by_eager(runs: Runs, values: Values) -> dict[str, torch.Tensor]:
    """Results, gradients and buffers by the step itself; the gradients are of the loss, or of the
    sum of all results."""
    captured, program = runs.captured, runs.captured.program
    arguments = _copies(runs, values)
    trains = bool(program.ports(Role.TANGENT))
    with Expected(), torch.set_grad_enabled(trains), values_kept(_state(runs)):
        results = dict(zip(captured.results, runs.step.run(*arguments), strict=True))
        tensors = {name: value.detach() for name, value in results.items()}
        slots = captured.slots(arguments)
        tensors |= {new: slots[name].detach() for name, new in captured.changed.items()}
        named = {port.fqn: slots[port.name] for port in program.inputs if port.name in slots}
        wanted = program.ports(Role.GRADIENT, Role.BATCH_GRADIENT)
        ends = [results[port.fqn] for port in program.ports(Role.TANGENT)]
        if ends and wanted:
            inputs = [named[port.fqn] for port in wanted]
            ones = [torch.ones_like(end) for end in ends]
            gradients = torch.autograd.grad(ends, inputs, ones, allow_unused=True)
            pairs = zip(wanted, gradients, strict=True)
            tensors |= {port.name: g for port, g in pairs if g is not None}
    carried = {f"new_{name}" for name in captured.carried}
    updates = [port for port in program.ports(Role.BUFFER_UPDATE) if port.name not in carried]
    return tensors | {port.name: named[port.fqn].detach() for port in updates}


def _by_program(program: Program, runs: Runs, values: Values) -> Named:
    """All results of a program, with the tangents of `_by_eager`."""
    inputs = with_sizes(program, runs.captured.slots(values))
    for port in program.ports(Role.TANGENT):
        inputs[port.name] = torch.ones(port.shape, dtype=port.dtype, device=port.device)
    ordered = [inputs.get(port.name) for port in program.inputs]
    with torch.no_grad(), _torch.no_autocast(), Expected():
        interpreter = _At(program.module)
        try:
            results: Named = interpreter.run(*ordered)
        except (IndexError, RuntimeError) as error:
            # Torch asserts what Python was told of sizes that data decide.
            if not runs.step.asked or interpreter.node is None:
                raise
            raise fails_elsewhere([source_line(interpreter.node)], error) from error
    return results


class _At(Unseeded):
    """Knows at which operation it is."""

    node: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        return super().run_node(n)


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two values agree, whole numbers exactly; what is not finite says nothing."""
    if first.shape != second.shape:
        return False
    if not first.is_floating_point():
        return bool(torch.equal(first, second)) if not first.is_complex() else True
    finite = first.isfinite() & second.isfinite()
    return close(first[finite], second[finite])
