"""The caller's own passes: each must give a sound program, which computes what it did before.

program --pass--> program          both on the first microbatch, from the same state:
(before)          (after)          loss, outputs, gradients, updates of buffers
"""

import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pfeife.frontend.captured import Captured
from pfeife.frontend.watch.deterministic import close
from pfeife.ir.digest import fingerprint
from pfeife.ir.editing.absorb import absorb
from pfeife.ir.editing.infer_values import settle
from pfeife.ir.evaluate import Result, evaluate
from pfeife.ir.parts import STATE_ROLES, Role
from pfeife.ir.program import Program
from pfeife.ir.verify import verify
from pfeife.passes.compose import Pass, Passes, Recorded, pass_name

log = logging.getLogger("pfeife")
_NOISE = 1e-6  # a share of the largest value of its kind: zero, but for rounding
# Of the largest value of a tensor. Other orders of the same sums make a tenth of it; a gelu by tanh
# instead of erf five times as much.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}


def guarded(passes: Passes) -> Passes:
    """The same passes, what they edit settled, and refused where one does not give a sound program
    with the ports it was given."""
    return {level: tuple(_guarded(level, own) for own in each) for level, each in passes.items()}


def _guarded(level: str, own: Pass) -> Pass:
    name = pass_name(own)

    def run(program: Program) -> Program:
        before = fingerprint(program)
        try:
            result = own(program)
        except Exception as error:
            error.add_note(f"in the pass {name} of the option passes, on the program of {level}")
            raise
        where = f"option passes: {name}, on the program of {level}:"
        # The history has the program before the pass, and is compared with what came after.
        if fingerprint(program) != before:
            raise ValueError(
                f"{where} it edited the program that it was given; a pass edits a copy, such as "
                "fx.GraphModule(program.module, copy.deepcopy(program.module.graph))"
            )
        if not isinstance(result, Program):
            raise ValueError(f"{where} it returned {type(result).__name__}, not a Program")
        try:
            # New nodes have no values yet; whoever comes next reads shapes and types of them.
            result = absorb(settle(verify(result)))
        except ValueError as error:
            raise ValueError(f"{where} {error}") from error
        # Arguments and results are bound by these ports, outside of all passes.
        if (program.inputs, program.outputs) != (result.inputs, result.outputs):
            raise ValueError(f"{where} {_other_ports(program, result)}")
        return result

    functools.update_wrapper(run, own)
    run.__qualname__ = name
    return run


def _other_ports(program: Program, result: Program) -> str:
    before, after = ({*each.inputs, *each.outputs} for each in (program, result))
    names = sorted({port.name for port in before ^ after})
    return (
        f"it has changed the ports {names or 'in their order'}; what goes into a step and comes "
        "out of it stays as it is"
    )


def check_unchanged(
    passed: Iterable[Recorded], captured: Captured, args: Sequence[Any], within: float | None
) -> None:
    """Raises ValueError for the first pass after which the first microbatch of a call gives
    something else, beyond rounding or `within` a share of the largest value of a tensor.

    Where the program before the pass cannot be run here, or gives no finite numbers, nothing is
    compared.
    """
    for step in passed:
        assert step.before is not None
        try:
            before = _first_microbatch(step.before, captured, args)
        except Exception as error:
            log.debug("the pass %s is not checked, since the step fails: %s", step.maker, error)
            return
        try:
            after = _first_microbatch(step.program, captured, args)
        except Exception as error:
            error.add_note(f"in the program that the pass {step.maker} of the option passes made")
            raise
        name = _changed(before, after, within)
        if name:
            raise ValueError(
                f"option passes: after {step.maker} the program computes another {name} on the "
                "first microbatch than before it; correct the pass, or say check=0.01 if it may "
                "change results by a hundredth of their largest value (check=False: by anything)"
            )


def _first_microbatch(program: Program, captured: Captured, args: Sequence[Any]) -> Result:
    """A step of the first microbatch alone, as every replica's."""
    slots, part = captured.slots(args), captured.slots(captured.part(args, 0))
    state = {port.fqn: slots[port.name].detach() for port in program.ports(*STATE_ROLES)}
    microbatch = {port.fqn: part[port.name] for port in program.ports(Role.BATCH)}
    microbatch |= {p.name: part[p.name] for p in program.ports(Role.SIZE) if p.name in part}
    ports = [port for port in program.ports(Role.TANGENT) if port.fqn != "loss"]
    tangents = {port.fqn: _tangent(port.shape, port.dtype, port.device) for port in ports}
    # A program of replicas reduces over all of them: each is given the same rows.
    count = program.replicas
    return evaluate(program, state, [microbatch] * count, tangents=[tangents] * count)


def _tangent(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The gradient of an output, another one for each of its elements."""
    size = torch.Size(shape)
    return torch.linspace(-1, 1, size.numel(), device=device).to(dtype).reshape(size)


def _changed(before: Result, after: Result, within: float | None) -> str:
    """The first value that two steps do not have alike, "" if there is none."""
    ours, theirs = (
        {key: _plain(value) for key, value in result.named().items()} for result in (before, after)
    )
    largest: dict[str, float] = {}
    for (kind, _), value in ours.items():
        largest[kind] = max(largest.get(kind, 0.0), _size(value))
    for (kind, name), value in ours.items():
        other = theirs.get((kind, name))
        if other is None or not _alike(value, other, within, _NOISE * largest[kind]):
            return name if kind == name else f"{kind} {name}"
    return ""


def _alike(value: torch.Tensor, other: torch.Tensor, within: float | None, noise: float) -> bool:
    if (value.shape, value.dtype) != (other.shape, other.dtype):
        return False
    if torch.equal(value, other):
        return True
    if not value.is_floating_point():
        return False
    # Where eager itself gives inf or NaN, an order of operations decides which; nothing can be told
    # by that.
    share = _ROUNDING.get(value.dtype) if within is None else within
    return not value.isfinite().all() or close(value, other, share, noise)


def _plain(value: torch.Tensor) -> torch.Tensor:
    """Dense, and of real numbers."""
    dense = value.detach() if value.layout == torch.strided else value.detach().to_dense()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def _size(value: torch.Tensor) -> float:
    counts = value.is_floating_point() and value.numel() and value.isfinite().all()
    return float(value.abs().max()) if counts else 0.0
