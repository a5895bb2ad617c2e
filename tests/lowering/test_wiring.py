"""Gradients are added in place, and nothing but the sum is ever written to."""

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import CASES, case
from share import crossed, random_cases
from torch import nn

import pfeife
from pfeife import sched
from pfeife.cost import estimate, machine
from pfeife.ir.parts import Role
from pfeife.lowering.wiring import summed_in_place
from pfeife.runtime import LocalPipeline
from pfeife.testing import assert_same, nets, plans, tied_across

CPU_CORE = machine("cpu-core")
MICROBATCHES = 3


class Net(nn.Module):
    """Parameters for the steps below."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.u, self.v = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))


def plain(net, x):
    return ((x @ net.a).tanh() @ net.b).square().sum()


def expanded(net, x):
    """The gradient of b is one number, seen 16 times."""
    return (x @ net.a).square().sum() + (net.b + x).sum()


def expanded_own(net, x):
    """The same, and the number is the stage's own."""
    return (x @ net.a).square().sum() + (net.b + x).sum() * 2


def same_gradient(net, x):
    """One tensor is the gradient of both a and b."""
    return ((x + net.a + net.b) @ net.u).square().sum()


def same_expanded_gradient(net, x):
    return (net.a + net.b + x).sum()


def transposed_gradient(net, x):
    """The gradient of b is that of a, looked at in another way."""
    return ((x + net.a + net.b.t()) @ net.u).square().sum()


def parts_of_a_gradient(net, x):
    """The gradients of a and of b are two halves of one storage."""
    return (torch.cat([x + net.a, net.b]) @ net.u).square().sum()


def handed_on(net, x):
    """The gradient of b is what the stage before goes on with."""
    return ((pfeife.stage_boundary(x @ net.a) + net.b) @ net.u).square().sum()


def handed_on_as_view(net, x):
    return ((pfeife.stage_boundary(x @ net.a).t() + net.b) @ net.u).square().sum()


def residual(net, x):
    """As in a transformer: one gradient passes by several stages and is that of two biases."""
    x = pfeife.stage_boundary(x @ net.a) + net.b
    x = pfeife.stage_boundary(x + (x @ net.u).tanh()) + net.v
    return x.square().sum()


def tied(net, x):
    x = pfeife.stage_boundary(x @ net.a)
    return (pfeife.stage_boundary(x @ net.b) @ net.a.t()).square().sum()


STEPS = {
    step.__name__: step
    for step in (
        *(
            plain,
            expanded,
            expanded_own,
            same_gradient,
            same_expanded_gradient,
            transposed_gradient,
        ),
        *(parts_of_a_gradient, handed_on, handed_on_as_view, residual, tied),
    )
}
# Parameters whose first gradient may take up the later ones.
IN_PLACE = {
    "plain": {"a", "b"},
    "expanded": {"a"},
    "expanded_own": {"a"},
    "same_gradient": {"u"},
    "same_expanded_gradient": set(),
    "transposed_gradient": {"u"},
    "handed_on": {"a", "u"},
    "handed_on_as_view": {"a", "u"},
}


def staged(program: pfeife.Program, policy: str, stages: int, split: bool):
    fused = pfeife.fuse()(program)
    fused = pfeife.annotate(estimate(fused, CPU_CORE))(fused)
    if stages == 1:
        plan = pfeife.Plan((0,) * fused.units, sched.policy(policy)(1, MICROBATCHES))
    else:
        marks = sched.cutting.marked(fused)
        stages = 1 + max(marks) if marks else min(stages, fused.units)
        plan = sched.plan(
            fused, machine=CPU_CORE, microbatches=MICROBATCHES, stages=stages, schedule=policy
        )
    passes = [pfeife.split_backward()] if split else []
    sent = pfeife.compose(pfeife.partition(plan), *passes, pfeife.insert_send_recv())(fused)
    return sent, sched.verify_schedule(sched.lower(plan.schedule, sent))


def tensors(result: pfeife.Result) -> dict[str, torch.Tensor]:
    found = {**result.gradients, **result.buffers}
    found |= {} if result.loss is None else {"loss": result.loss}
    for index, each in enumerate(result.outputs):
        found |= {f"output {name} of {index}": value for name, value in each.items()}
    for index, each in enumerate(result.batch_gradients):
        found |= {f"gradient of input {name} of {index}": v for name, v in each.items()}
    return found


def check_untouched(program, pipeline, state, batches, rounding=(), **options) -> None:
    """Two steps: each gives what evaluation gives, the first's result outlives the second, and
    state, batches and tangents stay as they were."""
    given = [*state.values(), *(x for batch in batches for each in batch for x in each)]
    given += [x for each in options.get("tangents", ()) for x in each.values()]
    before = [value.detach().clone() for value in given]
    kept = []
    for batch in batches:
        expected = pfeife.evaluate(program, state, batch, **options)
        found = pipeline(state, batch, **options)
        assert_same(expected, found, rounding)
        for one, other in zip(expected.batch_gradients, found.batch_gradients, strict=True):
            assert set(one) == set(other)
            assert all(torch.equal(one[name], other[name]) for name in one)
        kept.append((tensors(found), {n: v.clone() for n, v in tensors(found).items()}))
    for values, copies in kept:
        assert all(torch.equal(values[name], copies[name]) for name in copies)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@pytest.mark.parametrize(
    ("name", "policy", "split", "trained"),
    crossed([*STEPS], ["gpipe", "1f1b"], [False, True], [False, True]),
)
def test_sums_are_alone(name, policy, split, trained):
    """Also where the batch wants gradients, which may be those of a parameter."""
    torch.manual_seed(0)
    net = Net()
    batches = [
        [(torch.randn(4, 4).requires_grad_(trained),) for _ in range(MICROBATCHES)]
        for _ in range(2)
    ]
    program = pfeife.capture(lambda x: STEPS[name](net, x), *batches[0][0])
    assert bool(program.ports(Role.BATCH_GRADIENT)) == trained
    state = pfeife.state_of(program, net)
    for stages in (1, 3):
        sent, schedule = staged(program, policy, stages, split)
        rounding = ("a",) if name == "tied" else ()
        check_untouched(program, LocalPipeline(sent, schedule), state, batches, rounding)
        found = {port for call in sent.calls for port in summed_in_place(sent, call)}
        names = {port.fqn for port in sent.ports(Role.GRADIENT) if port.name in found}
        # On one rank nobody else need see what would be handed on.
        if name in IN_PLACE and not (stages == 1 and "handed" in name):
            assert names == IN_PLACE[name]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("policy", ["gpipe", "1f1b"])
def test_the_loss_outside(policy, turned):
    """The tangents are the caller's: a gradient is one of them, or looks at one in another way."""
    net = Net()
    batches = [[(torch.randn(4, 4),) for _ in range(MICROBATCHES)] for _ in range(2)]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return pfeife.stage_boundary(x @ self.net.a) @ self.net.u + (
                self.net.b.t() if turned else self.net.b
            )

    model = Model()
    program = pfeife.capture(model, *batches[0][0], loss="outside")
    state = pfeife.state_of(program, model)
    (tangent,) = program.ports(Role.TANGENT)
    tangents = [{tangent.fqn: torch.randn(4, 4)} for _ in range(MICROBATCHES)]
    sent, schedule = staged(program, policy, 2, False)
    pipeline = LocalPipeline(sent, schedule)
    check_untouched(program, pipeline, state, batches, tangents=tangents)


@pytest.mark.parametrize("name", CASES)
def test_models(name):
    one = case(name)
    batches = [[one.batch(2, 10 * step + k) for k in range(MICROBATCHES)] for step in range(2)]
    program = pfeife.capture(one.step, *batches[0][0])
    state = {n: v.clone() for n, v in pfeife.state_of(program, one.model).items()}
    sent, schedule = staged(program, "1f1b", 3, False)
    check_untouched(program, LocalPipeline(sent, schedule), state, batches, one.tied)
    summed = [port for call in sent.calls for port in summed_in_place(sent, call)]
    assert len(summed) >= len(sent.ports(Role.GRADIENT)) / 2, "most gradients are their own"


@random_cases(16)
@given(st.data())
def test_random_programs(data):
    net = data.draw(nets())
    batches = [[(torch.randn(3, 4),) for _ in range(MICROBATCHES)] for _ in range(2)]
    program = pfeife.capture(lambda x: net(x).square().mean(), *batches[0][0])
    state = {n: v.clone() for n, v in pfeife.state_of(program, net).items()}
    fused = pfeife.annotate(estimate(f := pfeife.fuse()(program), CPU_CORE))(f)
    plan = data.draw(plans(fused, MICROBATCHES))
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(fused)
    schedule = sched.verify_schedule(sched.lower(plan.schedule, sent))
    check_untouched(
        program, LocalPipeline(sent, schedule), state, batches, tied_across(plan, fused)
    )


def test_a_gradient_with_two_names():
    """Two ports of one value, made by hand: neither is written to."""
    net = Net()
    program = pfeife.capture(lambda x: plain(net, x), torch.randn(4, 4))
    fused = pfeife.fuse()(program)
    call = next(c for c in fused.calls if summed_in_place(fused, c))
    name = next(iter(summed_in_place(fused, call)))
    port = next(p for p in fused.outputs if p.name == name)
    graph = torch.fx.Graph()
    copies: dict = {}
    for node in fused.module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    output.args = ({**output.args[0], "again": output.args[0][name]},)
    twice = attrs.evolve(
        fused,
        module=torch.fx.GraphModule(fused.module, graph),
        outputs=(*fused.outputs, attrs.evolve(port, name="again")),
    )
    assert not {name, "again"} & summed_in_place(pfeife.verify(twice), call)


class Joined(torch.autograd.Function):
    """A cat whose backward looks at its gradient without saying so."""

    @staticmethod
    def forward(ctx, a, b):
        return torch.cat([a, b])

    @staticmethod
    def backward(ctx, gradient):
        return tuple(gradient.unsafe_chunk(2))


def test_views_that_hide():
    """unsafe_split promises fresh tensors and gives views."""
    torch.manual_seed(0)
    a, b, c = (nn.Parameter(torch.randn(rows, 4)) for rows in (2, 2, 4))
    u = nn.Parameter(torch.randn(4, 4))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.u = a, b, c, u

        def forward(self, x):
            return ((x + Joined.apply(self.a, self.b) + self.c) @ self.u).square().sum()

    model = Model()
    batch = [(torch.randn(4, 4),) for _ in range(3)]
    program = pfeife.capture(model, *batch[0])
    state = pfeife.state_of(program, model)
    sent, schedule = staged(program, "gpipe", 1, False)
    assert_same(pfeife.evaluate(program, state, batch), LocalPipeline(sent, schedule)(state, batch))
