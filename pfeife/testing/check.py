"""What every pass must keep, and what plain PyTorch gives for a step."""

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx, nn

from pfeife.data.plan import Plan
from pfeife.ir.combine import combined
from pfeife.ir.digest import fingerprint
from pfeife.ir.editing.infer_values import settle
from pfeife.ir.evaluate import Result, State, as_computed, evaluate
from pfeife.ir.lockstep import Each, Lockstep
from pfeife.ir.microbatch import named_batch, step_inputs
from pfeife.ir.nodes import is_sized_by_data, value_of
from pfeife.ir.parts import STATE_ROLES, Port, Role
from pfeife.ir.program import Program
from pfeife.ir.sizes import numbers_of_sizes, resized
from pfeife.ir.verify import verify
from pfeife.passes import partition
from pfeife.passes.compose import Pass
from pfeife.runtime.distributed.state.remote_gradients import is_here


def check_pass(
    pass_: Pass,
    program: Program,
    state: State,
    microbatches: Sequence[Any],
    *,
    rounding: Collection[str] | None = (),
    within: float | None = None,
    others: Sequence[Sequence[Any]] = (),
) -> Program:
    """Asserts what every pass keeps, and returns its output.

    The input is unchanged; the output is well formed and evaluates to what the input evaluates
    to, bit for bit but for the gradients named in `rounding` (None: for nothing), which agree to
    within rounding, or differ by no more than `within` of the largest value of their tensor; a
    second run gives the same text. What `settle` does for a pass, it does here too. `others` are
    microbatches of more steps: of other sizes, where the program leaves sizes open. Of these the
    output's nodes have the shapes that they say they have.
    """
    before = fingerprint(program)
    result = pass_(program)
    kind = type(result).__name__
    assert isinstance(result, Program), f"the pass returned {kind}, not a Program"
    assert fingerprint(program) == before, "the pass edited its input"
    result = settle(verify(result))
    assert fingerprint(pass_(program)) == fingerprint(result), "two runs gave two programs"
    for step in (microbatches, *others):
        # Bit for bit: what rounding hides, such as a microbatch taken twice by a mean, bits show.
        expected = evaluate(program, state, step)
        assert_same(expected, evaluate(result, state, step), rounding, within=within)
        for microbatch in step if result.ports(Role.SIZE) else ():
            _check_shapes(result, state, microbatch)
    return result


def _check_shapes(program: Program, state: State, microbatch: Any) -> None:
    """Asserts that nodes have the shapes that the expressions of their sizes say, and numbers that
    are computed of sizes the values."""
    batch = named_batch(program, microbatch)
    sizes = {port.name: batch[port.name] for port in program.ports(Role.SIZE)}
    ports = program.ports(Role.TANGENT)
    tangents = {p.fqn: torch.ones(p.shape_at(sizes), dtype=p.dtype) for p in ports}
    values = {port.name: as_computed(port, state[port.fqn]) for port in program.ports(*STATE_ROLES)}
    values |= step_inputs(program, batch, 0, 0, tangents)
    values |= {port.name: tangents[port.fqn] for port in ports}
    resized_program = resized(program, sizes)
    inputs = [Each(_of_members(program, port, values[port.name])) for port in program.inputs]
    with torch.no_grad():
        _Shapes(resized_program, resized_program.module).run(*inputs)


def _of_members(program: Program, port: Port, value: Any) -> tuple[Any, ...]:
    """What each member has of a value."""
    return (value,) * program.members if port.split is None else (*port.split.parts(value),)


class _Shapes(Lockstep):
    """Runs a graph of a program, and the bodies that it calls, and compares shapes with those of
    fake values, and numbers of sizes with those that nodes have."""

    def __init__(self, program: Program, module: fx.GraphModule):
        super().__init__(module, program.members)
        self.program = program
        self.numbers = numbers_of_sizes(program, self.graph, of_tensors=True)

    def run_node(self, n: fx.Node) -> Any:
        every, expected = super().run_node(n), value_of(n)
        for value in every.values:
            if n.name in self.numbers:
                assert value == n.meta["val"], f"{n.name} is {value}, not {n.meta['val']}"
            if expected is not None and not is_sized_by_data(n):
                shape, expected_shape = list(value.shape), list(expected.shape)
                assert shape == expected_shape, (
                    f"{n.name} is {shape}, and its sizes say {expected_shape}"
                )
        return every

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _Shapes(self.program, self.fetch_attr(target)).run(*args)


def assert_same(
    first: Result,
    second: Result,
    rounding: Collection[str] | None = (),
    *,
    within: float | None = None,
) -> None:
    """Asserts that two results are the same bits, but for gradients named in `rounding`, which
    agree to within rounding, or differ by no more than `within` of the largest value of their
    tensor; None lets the loss, every gradient, buffer and output differ so."""
    ours, theirs = first.named(), second.named()
    assert set(ours) == set(theirs), f"only one of them has {sorted(set(ours) ^ set(theirs))}"
    for (kind, name), value in ours.items():
        close = rounding is None or name in rounding
        _assert_tensor(name, value, theirs[kind, name], close, within)


def _assert_tensor(
    name: str, first: torch.Tensor, second: torch.Tensor, close: bool, within: float | None
) -> None:
    assert first.shape == second.shape and first.dtype == second.dtype, f"{name} has another form"
    if close and first.dtype.is_floating_point:
        most = first.abs().max().item() if within and first.numel() else 0.0
        rtol, atol = (0.0, within * most) if within else (1e-4, 1e-5)
        torch.testing.assert_close(
            first, second, rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}"
        )
    else:
        same = torch.equal(_bits(first), _bits(second))
        assert same, f"{name} differs by up to {(first - second).abs().max().item()}"


def _bits(value: torch.Tensor) -> torch.Tensor:
    # As bytes a NaN is equal to itself, and 0.0 is not equal to -0.0.
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def eager_accumulation(
    step: Callable[..., torch.Tensor], model: nn.Module, microbatches: Sequence[tuple]
) -> Result:
    """What plain PyTorch gives for a step: `(loss / microbatches).backward()` for each in order.

    The model's gradients and buffers are put back afterwards.
    """
    # Batch norms change their buffers in the forward, and the next comparison starts from the same.
    before = copy.deepcopy(model.state_dict())
    old_gradients = {parameter: parameter.grad for parameter in model.parameters()}
    model.zero_grad(set_to_none=True)
    losses = []
    for microbatch in microbatches:
        loss = step(*microbatch)
        losses.append(loss.detach())
        (loss / len(microbatches)).backward()
    changed = {
        name: value.clone()
        for name, value in model.named_buffers()
        if name in before and not torch.equal(value, before[name])
    }
    gradients = own_gradients(model)
    model.load_state_dict(before)
    for parameter, gradient in old_gradients.items():
        parameter.grad = gradient
    loss = combined(losses, [len(losses)] * len(losses))
    return Result(loss, tuple({} for _ in losses), gradients, changed)


def own_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients that this process has, by the names of the parameters: under torchrun other
    ranks have others."""
    return {name: p.grad for name, p in model.named_parameters() if is_here(p.grad)}


def tied_across(plan: Plan, program: Program) -> set[str]:
    """The parameters whose gradient a plan sums over stages: it may differ by rounding."""
    names = [port.fqn for port in partition(plan)(program).ports(Role.GRADIENT)]
    return {name for name in names if names.count(name) > 1}
