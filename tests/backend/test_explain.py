"""What would become of a step, said without training it; and that nothing of it is left behind."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from share import whole
from torch import nn

import pfeife

OPTIONS = {"microbatches": 2, "stages": 2}


def layers(count: int = 3, width: int = 8) -> nn.Sequential:
    pairs = [(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def state_of(model: nn.Module) -> dict:
    gradients = {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters()}
    return copy.deepcopy(model.state_dict()) | gradients


def test_a_step_of_one_graph():
    net = layers()
    found = pfeife.explain(lambda x: net(x).square().mean(), torch.ones(8, 8), options=OPTIONS)
    assert found.door == "dynamo" and found.pipelined == 1.0 and found.stages == 2
    assert not found.refused and not found.breaks and not found.parts
    assert ("TENSOR_MATCH", "L['args'][0]") in {(one.kind, one.what) for one in found.premises}
    assert found.clusters == 3 and sum(line.clusters for line in found.lines) == 3
    assert "test_explain.py" in found.lines[0].line and found.lines[0].module == "4"
    assert 0 < found.lines[0].largest <= found.lines[0].seconds < found.seconds
    assert "so no more than 1 stages can be even" in str(found)


def test_a_traced_step_says_its_answers(lines):
    net = layers()

    def step(x):
        h = net(x)
        if h.detach().abs().max() > 100:
            h = h / 2
        return h.square().mean()

    found = pfeife.explain(step, torch.ones(8, 8), options=OPTIONS)
    assert found.door == "trace" and found.pipelined == 1.0 and found.stages == 2
    assert "Data-dependent branching" in found.refused["dynamo"]
    answer = next(one for one in found.premises if one.kind == "answer")
    assert "in step asks and gets False" in answer.what and str(answer) in str(found)
    assert any(one.kind == "value" and "in_features is 8" in one.what for one in found.premises)
    assert [name for name, _ in found.parts] == ["step", *[n for n, _ in found.parts[1:]]]
    assert "Tensor" in found.breaks[0][0] and "in step" in found.breaks[0][1]
    pfeife.compile(step, **OPTIONS)(torch.ones(8, 8))
    assert found.why in [one.getMessage() for one in lines.records], "one wording for both"


def test_a_refused_step_is_explained():
    net = layers(4)

    def step(x):
        h = net[:4](x) * random.choice([1.0, 1.0])
        return F.mse_loss(net[4:](h), x.tanh())

    found = pfeife.explain(step, torch.ones(6, 8), options=OPTIONS)
    assert found.door is None and found.pipelined == 1.0, "by the backend, in two graphs"
    assert "draws from a generator of Python's" in found.refused["trace"]
    assert found.refused["dynamo"] and all(said in str(found) for said in found.refused.values())
    assert len(found.parts) == 2 and len(found.breaks) == 1
    assert 'test_explain.py", line' in found.breaks[0][1]


def test_what_cannot_be_cut():
    found = pfeife.explain(lambda x: x.sum(), torch.ones(7, 8), options=OPTIONS)
    assert found.door is None and "does not divide" in found.refused["batch"]
    assert found.pipelined == 0.0


def test_the_graphs_of_the_backend():
    """What the log of a call says of them."""
    net = layers(6)

    @torch.compiler.disable
    def shift(h):
        return h + 1

    def step(x):
        return F.mse_loss(net[6:](shift(net[:6](x))), x)

    x = torch.ones(6, 8)
    found = pfeife.explain(step, x, entry="torch.compile", options=OPTIONS)
    assert found.door is None and [part.instead for _, part in found.parts] == ["", ""]
    assert found.pipelined == 1.0 and "Dynamo makes 2 graphs of it, and 100 %" in str(found)
    backend = pfeife.backend(**OPTIONS)
    torch.compile(step, backend=backend, dynamic=True)(x)
    expected = backend.parts[True].by_runner.values()
    assert list(expected) == [part for _, part in found.parts]


@pytest.mark.parametrize("entry", ["pfeife.compile", "torch.compile"])
def test_the_backend_is_not_given_in_dims(entry):
    net = layers()

    def step(x):
        h = net(x)
        torch._dynamo.graph_break()
        return h.square().mean()

    def explained(in_dims):
        x = torch.ones(8, 8)
        return pfeife.explain(step, x, in_dims=in_dims, entry=entry, options=OPTIONS)

    found, plain = explained((0,)), explained(0)
    assert found.refused == plain.refused and "backend" not in found.refused
    assert [name for name, _ in found.parts] == [name for name, _ in plain.parts] != []


def test_the_backend_takes_a_module_whole():
    x = torch.ones(6, 8)
    found = pfeife.explain(layers(), x, entry="torch.compile", options=OPTIONS)
    assert found.stages == 2 and found.pipelined == 1.0 and not found.refused
    square = pfeife.explain(
        layers(), torch.ones(8, 8), entry="torch.compile", options=OPTIONS | {"stages": 9}
    )
    assert "backend" in square.refused and square.pipelined == 0.0


@pytest.mark.parametrize("entry", ["pfeife.compile", whole("torch.compile")])
def test_nothing_is_left_behind(entry, capfd):
    """Of a step that draws, counts, keeps, updates and runs backward; nothing is printed."""
    net = nn.Sequential(*layers(2), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    net(torch.ones(4, 8)).sum().backward()
    own = torch.Generator().manual_seed(3)
    seen: list = []

    def step(x):
        h = net(x) * random.random() + torch.rand(8, generator=own)
        seen.append(h)
        net.calls = getattr(net, "calls", 0) + 1
        if h.sum() > 0:
            h.square().mean().backward(retain_graph=True)
        return F.mse_loss(h, x)

    before, torchs = state_of(net), torch.get_rng_state()
    pythons, theirs, names = random.getstate(), own.get_state(), set(vars(net))
    for _ in range(2):
        pfeife.explain(step, torch.randn(6, 8), entry=entry, options=OPTIONS)
        torch.set_rng_state(torchs)
    after = state_of(net)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert random.getstate() == pythons and torch.equal(torch.get_rng_state(), torchs)
    assert torch.equal(own.get_state(), theirs) and set(vars(net)) == names and not seen
    assert not capfd.readouterr().out


def test_wrong_requests():
    with pytest.raises(ValueError, match=r"unknown options \['stage'\]"):
        pfeife.explain(layers(), torch.ones(4, 8), options={"stage": 2})
    with pytest.raises(ValueError, match="entry='backend'"):
        pfeife.explain(layers(), torch.ones(4, 8), entry="backend")
    with pytest.raises(TypeError, match="missing a required argument"):
        pfeife.explain(lambda x, y: x.sum(), torch.ones(4, 8))
