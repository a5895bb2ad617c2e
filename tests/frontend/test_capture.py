"""Capturing: names, tied parameters, batch inputs, and models that were never allocated."""

from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
import torch
import torch.nn.functional as F
from models import GPT, case
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import pfeife
from pfeife import Role
from pfeife.frontend.aot.joint import trace
from pfeife.frontend.batch import Cutter
from pfeife.frontend.capture import _Doors
from pfeife.testing import assert_same, eager_accumulation


def names(program, *roles):
    return {port.fqn: port.names for port in program.ports(*roles)}


def test_ports_have_the_names_of_the_model():
    one = case("BatchNormNet")
    program = pfeife.capture(one.step, *one.batch(2))
    assert set(names(program, Role.PARAMETER)) == dict(one.model.named_parameters()).keys()
    assert set(names(program, Role.GRADIENT)) == dict(one.model.named_parameters()).keys()
    assert set(names(program, Role.BUFFER_UPDATE)) == dict(one.model.named_buffers()).keys()
    assert set(names(program, Role.BATCH)) == {"x", "kinds"}
    assert [port.fqn for port in program.ports(Role.LOSS, Role.OUTPUT)] == ["loss"]


def test_tied_parameters_come_once_with_all_names():
    one = case("TiedGPT")
    program = pfeife.capture(one.step, *one.batch(2))
    assert names(program, Role.PARAMETER)["embed.weight"] == ("embed.weight", "head.weight")
    assert names(program, Role.GRADIENT)["embed.weight"] == ("embed.weight", "head.weight")


def test_several_models_in_one_step():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)

    def step(x):
        return second(first(x)).square().mean()

    program = pfeife.capture(step, torch.randn(2, 3))
    assert set(names(program, Role.PARAMETER)) == {
        "first.weight",
        "first.bias",
        "second.weight",
        "second.bias",
    }


def test_modules_with_a_getattr_of_their_own_have_their_names():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(4, 4)

        def __getattr__(self, name):
            return super().__getattr__(name)

        def forward(self, x):
            return self.up(x)

    net = nn.Sequential(Block(), Block())
    program = pfeife.capture(lambda x: net(x).square().mean(), torch.randn(2, 4))
    assert set(names(program, Role.PARAMETER)) == dict(net.named_parameters()).keys()


def test_a_module_a_method_and_a_holder_can_be_the_step():
    class Trainer:
        def __init__(self):
            self.model = nn.Linear(3, 2)

        def loss(self, x):
            return self.model(x).square().mean()

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, batch):
            return {"loss": self.inner(batch["x"]).square().mean()}

    x = torch.randn(2, 3)
    assert set(names(pfeife.capture(Trainer().loss, x), Role.PARAMETER)) == {"weight", "bias"}
    program = pfeife.capture(Loss(), {"x": x})
    assert set(names(program, Role.PARAMETER)) == {"inner.weight", "inner.bias"}
    assert set(names(program, Role.BATCH)) == {"batch.x"}


def test_only_what_asks_for_gradients_gets_them():
    model = nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    scale = torch.tensor([1.0, 2.0, 3.0])

    def step(x, y):
        return (model(x) * scale * y).sum()

    program = pfeife.capture(step, torch.randn(2, 3), torch.randn(2, 3, requires_grad=True))
    assert set(names(program, Role.GRADIENT)) == {"weight"}
    assert set(names(program, Role.BATCH_GRADIENT)) == {"y"}
    assert set(names(program, Role.CONSTANT)) == {"scale"}


def test_other_results_are_outputs_without_tangents():
    one = case("GPT")

    def step(tokens, targets):
        logits = one.model(tokens)
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten())}

    program = pfeife.capture(step, *one.batch(2))
    assert [port.fqn for port in program.ports(Role.TANGENT)] == ["loss"]
    assert [port.shape for port in program.ports(Role.OUTPUT)] == [(2, 8, 23)]


@pytest.mark.parametrize("where, door", [("meta", "auto"), ("fake", "dynamo"), ("fake", "trace")])
def test_a_model_too_large_to_allocate(where, door):
    """A terabyte of parameters; planning asks for shapes only."""
    with torch.device("meta") if where == "meta" else FakeTensorMode():
        model = GPT(width=2**17, depth=3)
        tokens = torch.zeros(2, 8, dtype=torch.int64)
    assert sum(p.numel() for p in model.parameters()) * 4 > 1e12

    def step(tokens):
        return model(tokens).float().square().mean()

    program = pfeife.capture(step, tokens, door=door)
    fused = pfeife.fuse()(program)
    machine = pfeife.Machine("big", 1e14, 1e12, 2**43, 1e11)
    fused = pfeife.annotate(pfeife.cost.estimate(fused, machine))(fused)
    plan = pfeife.sched.plan(fused, machine=machine, microbatches=4, stages=4)
    assert pfeife.verify(pfeife.partition(plan)(fused)).units == 4


def test_capturing_runs_and_changes_nothing():
    one = case("BatchNormNet")
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    state = torch.get_rng_state()
    pfeife.capture(one.step, *one.batch(2))
    torch.manual_seed(0)
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in one.model.parameters())
    torch.set_rng_state(state)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic", "area"])
def test_interpolation_is_that_of_eager(mode):
    """Its kernels, in both directions: tracing knows other ways to compute it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3))

    def step(x):
        return net[1](F.interpolate(net[0](x), scale_factor=1.7, mode=mode)).square().mean()

    microbatches = [(torch.randn(2, 2, 9, 9),) for _ in range(2)]
    program = pfeife.capture(step, *microbatches[0])
    found = pfeife.evaluate(program, pfeife.state_of(program, net), microbatches)
    assert_same(eager_accumulation(step, net, microbatches), found)
    assert not any("index" in str(node.target) for node in program.module.graph.nodes)


def test_draws_that_nobody_reads_are_left_out():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def step(x):
        F.dropout(x @ net[0].weight)
        F.scaled_dot_product_attention(*[x.view(1, 1, 2, 4)] * 3)
        return net(x).square().mean()

    program = pfeife.capture(step, torch.randn(2, 4))
    targets = [str(node.target) for node in program.module.graph.nodes]
    assert not any("dropout" in name or "attention" in name for name in targets)
    assert not program.ports(pfeife.Role.SEED)


def test_what_is_no_graph_is_said():
    model = nn.Linear(3, 3)

    def breaks(x):
        return model(x).sum() if x.sum().item() > 0 else model(-x).sum()

    with pytest.raises(ValueError, match="could not be captured as one graph"):
        pfeife.capture(breaks, torch.randn(2, 3), door="dynamo")
    with pytest.raises(ValueError, match=r"one graph: .*; nor by .*on meta tensors"):
        pfeife.capture(lambda x: breaks(x), torch.randn(2, 3, device="meta"))
    with pytest.raises(ValueError, match="door='dynamos'"):
        pfeife.capture(breaks, torch.randn(2, 3), door="dynamos")

    def changes(x):
        x.mul_(2)
        return model(x).sum()

    with pytest.raises(ValueError, match=r"changes its input x in place.* \(File .*, in changes\)"):
        pfeife.capture(changes, torch.randn(2, 3))


def test_what_dynamo_breaks_is_traced(lines):
    """With the numbers of eager where its answers hold, and a count of where they do not."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def step(x):
        if x.abs().max() > 9:
            x = x / 2
        return model(x).square().mean()

    batches = [(torch.randn(4, 3),) for _ in range(3)]
    program = pfeife.capture(step, *batches[0])
    assert "step is traced as it runs, since" in lines.records[-1].getMessage()
    assert names(program, Role.BATCH) == {"x": ("x",)}
    state = pfeife.state_of(program, model)
    found = pfeife.evaluate(program, state, batches)
    expected = eager_accumulation(step, model, batches)
    assert_same(attrs.evolve(found, outputs=expected.outputs), expected)
    (flag,) = program.ports(Role.OUTPUT)
    assert flag.reduction == "sum" and [float(one[flag.fqn]) for one in found.outputs] == [0.0] * 3
    wrong = pfeife.evaluate(program, state, [*batches[:2], (torch.full((4, 3), 10.0),)])
    assert [float(one[flag.fqn]) for one in wrong.outputs] == [0.0, 0.0, 1.0]


def test_a_trace_of_the_meta_device():
    with torch.device("meta"):
        net, x = nn.Linear(4, 1), torch.ones(2, 4)

    def step(x):
        return net(x).mean()

    texts = {str(pfeife.capture(step, x, door=door)) for door in ("dynamo", "trace")}
    assert len(texts) == 1 and " meta" not in texts.pop()


@pytest.mark.parametrize("door", ["dynamo", "trace"])
def test_progress_is_told(door):
    net, told = nn.Linear(4, 1), []
    pfeife.capture(
        lambda x: net(x).mean(), torch.ones(2, 4), door=door, progress=lambda *at: told.append(at)
    )
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_state_is_checked():
    one = case("GPT")
    program = pfeife.capture(one.step, *one.batch(2))
    with pytest.raises(ValueError, match=r"the state has no parameter embed.weight"):
        pfeife.state_of(program, nn.Linear(1, 1))
    state = pfeife.state_of(program, one.model)
    with pytest.raises(ValueError, match=r"microbatch 1, input tokens: .* this is torch.int64 \[3"):
        pfeife.evaluate(program, state, [one.batch(2), one.batch(3)])
    with pytest.raises(ValueError, match="microbatch 0 has 1 tensors"):
        pfeife.evaluate(program, state, [one.batch(2)[:1]])
    with pytest.raises(ValueError, match="0 microbatches"):
        pfeife.evaluate(program, state, [])


def test_a_program_says_what_a_trace_takes_for_granted():
    net = torch.nn.Linear(4, 1)

    def step(x):
        return net(x).mean() * (2.0 if x.sum() > 0 else 1.0)

    flat = pfeife.capture(step, torch.ones(2, 4), door="trace")
    assert any(one.kind == "value" and "in_features is 4" in one.what for one in flat.premises)
    (answer,) = [one for one in flat.premises if one.kind == "answer"]
    assert str(answer) in str(flat) and "gets True" in answer.what
    assert pfeife.fuse()(flat).premises == flat.premises


def test_a_size_of_data_is_where_the_data_are():
    x = torch.ones(3, 2, device="meta")
    program = pfeife.capture(lambda x: x[x > 0].mean(), x, loss_reduction="mean", device="meta")
    values = [node.meta.get("val") for node in program.module.graph.nodes]
    places = [one.device.type for one in values if isinstance(one, torch.Tensor)]
    assert places == ["meta"] * 5  # x, a mask, what it selects, how many these are, their mean


def test_a_forward_alone_of_a_step_that_switches_gradients_on():
    """As it does at the end of its own torch.no_grad()."""
    net, table = nn.Linear(4, 4), torch.randn(8, 4)

    def step(x):
        with torch.no_grad():
            found = table[: x.shape[0]].sin()
        return net(x + found).mean()

    x = torch.ones(2, 4)
    doors = _Doors(step, Cutter(step, None, 1)((x,), {}), x.device)
    program = trace(*doors.by("dynamo"), None, gradients=False).program
    assert [port.name for port in program.outputs] == ["loss"]
    assert not program.ports(Role.TANGENT)


def test_a_thread_that_draws_while_another_captures():
    """What it draws is put back with what a trace may have drawn: the step is refused."""

    def step(x):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(torch.randn, 3).result()
        return x.square().mean()

    with pytest.raises(ValueError, match="another thread has drawn"):
        pfeife.capture(step, torch.randn(4, 3), door="trace")


def test_threads_that_capture_at_once():
    """One after another: a capture changes parts of torch for a while."""
    # Made before: a thread that draws while another one captures moves the generator that a step
    # must leave alone.
    nets = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)) for _ in range(8)]
    batch = torch.randn(3, 4)

    def captured(index: int) -> int:
        net = nets[index]

        def step(x):
            scale = 2.0 if torch.compiler.is_compiling() else 3.0
            return (net(x) * scale).square().mean() + index

        door = "trace" if index % 2 else "dynamo"
        return len(pfeife.capture(step, batch, door=door).inputs)

    kept = torch.nn.Module._apply, torch.SymInt.__repr__, max, min
    with ThreadPoolExecutor(4) as pool:
        counts = [*pool.map(captured, range(8))]
    assert len(set(counts)) == 1
    assert not torch.compiler.is_compiling()
    assert (torch.nn.Module._apply, torch.SymInt.__repr__, max, min) == kept
