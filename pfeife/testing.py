"""For those who write passes: random programs and plans, and what every pass must keep.

Needs hypothesis (the extra `dev`).
"""

import copy
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import nn

from pfeife.cost import machine
from pfeife.data.plan import Plan, RecomputeOption
from pfeife.ir.digest import fingerprint
from pfeife.ir.evaluate import Result, State, combined, evaluate
from pfeife.ir.outline import inline
from pfeife.ir.program import Kind, Program, Role
from pfeife.ir.settle import settle
from pfeife.ir.verify import verify
from pfeife.passes import partition
from pfeife.passes.compose import Pass
from pfeife.runtime.distributed.elsewhere import is_here
from pfeife.sched import policy
from pfeife.sched.cutting import choose_recompute
from pfeife.sched.cutting.workload import blocked_borders


def check_pass(
    one: Pass,
    program: Program,
    state: State,
    microbatches: Sequence[Any],
    *,
    rounding: Collection[str] | None = (),
    within: float | None = None,
) -> Program:
    """Asserts what every pass keeps, and returns its output.

    The input is unchanged; the output is well formed and evaluates to what the input evaluates
    to, bit for bit but for the gradients named in `rounding` (None: for nothing), which agree to
    within rounding, or differ by no more than `within` of the largest value of their tensor; a
    second run gives the same text. What `settle` does for a pass, it does here too.
    """
    before = fingerprint(program)
    result = one(program)
    given = type(result).__name__
    assert isinstance(result, Program), f"the pass returned {given}, not a Program"
    assert fingerprint(program) == before, "the pass edited its input"
    result = settle(verify(result))
    assert fingerprint(one(program)) == fingerprint(result), "two runs gave two programs"
    assert_same(
        evaluate(program, state, microbatches),
        evaluate(result, state, microbatches),
        rounding,
        within=within,
    )
    return result


def assert_same(
    one: Result,
    other: Result,
    rounding: Collection[str] | None = (),
    *,
    within: float | None = None,
) -> None:
    """Asserts that two results are the same bits, but for gradients named in `rounding`, which
    agree to within rounding, or differ by no more than `within` of the largest value of their
    tensor; None lets the loss, every gradient, buffer and output differ so."""
    assert set(one.gradients) == set(other.gradients), "other parameters have gradients"
    assert set(one.buffers) == set(other.buffers), "other buffers are updated"
    pairs = [(name, one.gradients[name], other.gradients[name]) for name in one.gradients]
    pairs += [(name, one.buffers[name], other.buffers[name]) for name in one.buffers]
    if one.loss is not None or other.loss is not None:
        assert one.loss is not None and other.loss is not None, "one has a loss"
        pairs.append(("loss", one.loss, other.loss))
    for index, (first, second) in enumerate(zip(one.outputs, other.outputs, strict=True)):
        assert set(first) == set(second), "other outputs"
        pairs += [(f"{name} of microbatch {index}", first[name], second[name]) for name in first]
    for name, first_value, second_value in pairs:
        close = rounding is None or name in rounding
        _assert_tensor(name, first_value, second_value, close, within)


def _assert_tensor(
    name: str, one: torch.Tensor, other: torch.Tensor, close: bool, within: float | None
) -> None:
    assert one.shape == other.shape and one.dtype == other.dtype, f"{name} has another form"
    if close and one.dtype.is_floating_point:
        most = one.abs().max().item() if within and one.numel() else 0.0
        rtol, atol = (0.0, within * most) if within else (1e-4, 1e-5)
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}")
    else:
        same = torch.equal(_bits(one), _bits(other))
        assert same, f"{name} differs by up to {(one - other).abs().max().item()}"


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def eager_accumulation(
    step: Callable[..., torch.Tensor], model: nn.Module, microbatches: Sequence[tuple]
) -> Result:
    """What plain PyTorch gives for a step: `(loss / microbatches).backward()` for each in order.

    The model's gradients and buffers are put back afterwards.
    """
    before = copy.deepcopy(model.state_dict())
    kept = {parameter: parameter.grad for parameter in model.parameters()}
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
    for parameter, gradient in kept.items():
        parameter.grad = gradient
    loss = combined(losses, [len(losses)] * len(losses))
    return Result(loss, tuple({} for _ in losses), gradients, changed)


def own_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients that this process has, by the names of the parameters: under torchrun other
    ranks have others."""
    return {name: p.grad for name, p in model.named_parameters() if is_here(p.grad)}


@attrs.frozen
class Layer:
    """One operation of a `RandomNet`: what it is and which earlier values it reads."""

    operation: str
    first: int
    second: int


STATIC = ("linear", "tied", "relu", "add", "mul", "norm", "batch_norm", "swap", "halves", "number")
OPERATIONS = (*STATIC, "rows", "count")


class RandomNet(nn.Module):
    """A net of drawn operations on values of one shape; the last ones are summed up.

    "tied" uses the weight of the net's first "linear" again, transposed. In "number", "rows" and
    "count" data decide a number, how many rows are taken, and by how many is divided.
    """

    width = 4

    def __init__(self, layers: Sequence[Layer]):
        super().__init__()
        self.layers = tuple(layers)
        self.shared = nn.Linear(self.width, self.width)
        made = {"linear": nn.Linear, "norm": nn.LayerNorm, "batch_norm": nn.BatchNorm1d}
        self.modules_of = nn.ModuleDict()
        for index, layer in enumerate(layers):
            if layer.operation in made:
                sizes = (self.width,) * (2 if layer.operation == "linear" else 1)
                self.modules_of[str(index)] = made[layer.operation](*sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for index, layer in enumerate(self.layers):
            one, other = values[layer.first], values[layer.second]
            values.append(self._run(index, layer.operation, one, other))
        return self.shared(values[-1]) + values[len(values) // 2]

    def _run(
        self, index: int, operation: str, one: torch.Tensor, other: torch.Tensor
    ) -> torch.Tensor:
        if str(index) in self.modules_of:
            return self.modules_of[str(index)](one)
        if operation == "tied":
            return one @ self.shared.weight
        if operation == "relu":
            return one.relu()
        if operation == "add":
            return one + other
        if operation == "mul":
            return one * other.tanh()
        if operation == "swap":
            return one.flip(1)
        if operation == "number":
            return one * other.mean().tanh().item()
        if operation in ("rows", "count"):
            (chosen,) = (other[:, 0] > 0).nonzero(as_tuple=True)
            parts = one[chosen] if operation == "rows" else one[chosen] / (1 + len(chosen))
            return one.index_add(0, chosen, parts)
        left, right = one.chunk(2, dim=1)
        return torch.cat([right, left + other[:, :2]], dim=1)


@st.composite
def nets(
    draw: st.DrawFn, largest: int = 8, linear: int = 0, operations: Sequence[str] = OPERATIONS
) -> RandomNet:
    """Random nets: with skip connections, tied weights, updated buffers, sizes that data decide.

    At least `linear` of the operations, of which there are at most `largest` more, are linear
    layers, so that there is something to cut. In nets of `STATIC` operations data decide no size.
    """
    drawn = draw(st.lists(st.sampled_from(operations), min_size=2, max_size=largest))
    names = draw(st.permutations(["linear"] * linear + drawn))
    layers = [
        Layer(
            operation,
            draw(st.integers(max(0, index - 2), index)),
            draw(st.integers(0, index)),
        )
        for index, operation in enumerate(names)
    ]
    torch.manual_seed(draw(st.integers(0, 1000)))
    return RandomNet(layers)


@st.composite
def plans(
    draw: st.DrawFn,
    program: Program,
    microbatches: int,
    largest: int = 4,
    ranks: int | None = None,
    names: Sequence[str] = ("gpipe", "1f1b"),
) -> Plan:
    """Random plans of a fused and annotated program: cuts, placement and policy.

    At most `largest` stages, on `ranks` ranks or on any number. A program that cannot be cut
    into enough stages is not drawn.
    """
    blocked = blocked_borders(program)
    borders = [border for border in range(1, program.units) if border not in blocked]
    assume(len(borders) >= (ranks or 1) - 1)
    chosen = st.sets(
        st.sampled_from(borders or [0]), min_size=(ranks or 1) - 1, max_size=largest - 1
    )
    cuts = draw(chosen) if borders else set()
    stage_of = tuple(sum(cut <= unit for cut in cuts) for unit in range(program.units))
    count = ranks or draw(st.integers(1, len(cuts) + 1))
    placed = tuple(stage % count for stage in range(len(cuts) + 1))
    order = policy(draw(st.sampled_from(names)))(len(cuts) + 1, microbatches, placed)
    return Plan(stage_of, order)


@st.composite
def recomputing(draw: st.DrawFn, plan: Plan, program: Program) -> Plan:
    """A plan of a fused program with what its stages recompute: any of their forwards' nodes, or
    what `choose_recompute` takes for a drawn budget."""
    if draw(st.booleans()):
        choice = functools.partial(
            choose_recompute, partition(plan)(program), machine=machine("cpu-core")
        )
        least, most = (max(one.saved for one in choice(budget)) for budget in ("full", "none"))
        budgets: Any = st.integers(least, max(least, most)) | st.sampled_from(
            ["none", "full", "selective"]
        )
        return attrs.evolve(plan, recompute=choice(draw(budgets), duplicated=plan.duplicated))
    _, groups = inline(program)
    names: list[list[str]] = [[] for _ in range(plan.stages)]
    for name, group in groups.items():
        if group.kind == Kind.FORWARD and name not in plan.duplicated:
            names[plan.stage_of_cluster[group.unit]].append(name)
    drawn = [draw(st.sets(st.sampled_from(one or [""]))) - {""} for one in names]
    options = [RecomputeOption(names=tuple(sorted(one))) for one in drawn]
    return attrs.evolve(plan, recompute=tuple(options))


def tied_across(plan: Plan, program: Program) -> set[str]:
    """The parameters whose gradient a plan sums over stages: it may differ by rounding."""
    names = [port.fqn for port in partition(plan)(program).ports(Role.GRADIENT)]
    return {name for name in names if names.count(name) > 1}
