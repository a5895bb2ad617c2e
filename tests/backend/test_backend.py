"""An unchanged training loop: the same losses, gradients and buffers as plain accumulation."""

import copy
import logging
from types import SimpleNamespace

import attrs
import pytest
import torch
import torch.nn.functional as F
from listening import Lines
from models import CASES, EQUAL_TO_EAGER, case
from share import crossed, some
from torch import nn

import pfeife
from pfeife.cost import memory_curves
from pfeife.testing import assert_same, eager_accumulation


def train(step, model, batches, call):
    """Losses of a loop with AdamW and clipping, built before the first step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(call(step, batch))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


def accumulated(count):
    def call(step, batch):
        total = None
        for microbatch in zip(*(x.chunk(count) for x in batch), strict=True):
            loss = step(*microbatch) / count
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        return total

    return call


def whole(step, batch):
    loss = step(*batch)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(("name", "way"), crossed(EQUAL_TO_EAGER, ["compile", "dynamic"]))
def test_a_loop_of_steps_is_the_same(name, way):
    one = case(name)
    other = CASES[name](copy.deepcopy(one.model))
    options = {"microbatches": 3, "stages": 3}
    if way == "compile":
        step = pfeife.compile(one.step, **options)
    else:
        step = torch.compile(one.step, backend="pfeife", options=options, dynamic=True)
    batches = [one.batch(6, seed) for seed in range(3)]
    ours = train(step, one.model, batches, whole)
    theirs = train(other.step, other.model, batches, accumulated(3))
    if one.tied:
        torch.testing.assert_close(ours, theirs)
        return
    assert ours == theirs
    for key, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[key]), key


@pytest.mark.skipif(
    not hasattr(torch.compiler, "set_default_backend"), reason="torch 2.11 has no default backend"
)
def test_the_default_backend():
    one = case("UNet")
    reference = eager_accumulation(one.step, one.model, [one.batch(2)])
    torch.compiler.set_default_backend(pfeife.backend(stages=2))
    try:
        loss = torch.compile(one.step)(*one.batch(2))
    finally:
        torch.compiler.set_default_backend("inductor")
    loss.backward()
    assert torch.equal(loss, reference.loss)
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter.grad, reference.gradients[name])


def test_in_dims_say_where_the_batch_is():
    model = nn.Linear(3, 3)

    def step(columns, weights, scale):
        return (model(columns.t()) * weights).square().mean() * scale

    columns, weights, scale = torch.randn(3, 4), torch.randn(4, 1), torch.tensor(2.0)
    compiled = pfeife.compile(step, in_dims=(1, 0, None), microbatches=2)
    halves = list(zip(columns.chunk(2, 1), weights.chunk(2), strict=True))
    expected = eager_accumulation(step, model, [(a, b, scale) for a, b in halves])
    loss = compiled(columns, weights, scale)
    loss.backward()
    assert torch.equal(loss, expected.loss)
    assert torch.equal(model.weight.grad, expected.gradients["weight"])


def test_draws_do_not_depend_on_stages_or_schedule():
    results = []
    for stages, schedule in ((1, "gpipe"), (2, "gpipe"), (3, "1f1b"), (4, "1f1b")):
        torch._dynamo.reset()
        one = case("DropoutNet")
        batch = one.batch(4)
        torch.manual_seed(5)
        step = pfeife.compile(one.step, microbatches=2, stages=stages, schedule=schedule)
        loss = step(*batch)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in one.model.parameters())])
        again = step(*batch)
        assert not torch.equal(loss, again), "every step draws anew"
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_sizes_may_change():
    one = case("GPT")
    step = pfeife.compile(one.step, microbatches=2, stages=2)
    for rows in (4, 6, 8, 4):
        batch = one.batch(rows)
        parts = list(zip(*(x.chunk(2) for x in batch), strict=True))
        assert torch.equal(step(*batch), eager_accumulation(one.step, one.model, parts).loss)
    assert len(step.backend.compiled) == 2, "the second is for any number of rows"


def test_what_cannot_be_is_said_before_anything_runs():
    one = case("GPT")
    batch = one.batch(6)
    wrong = [
        ({"microbatch": 2}, r"unknown options \['microbatch'\]"),
        ({"microbatches": 0}, "microbatches=0: must be a positive integer"),
        ({"microbatches": 4}, r"6 rows does not divide into 4 microbatches; pass microbatches=3"),
        ({"microbatches": 2, "stages": 99}, r"only \d+ clusters"),
        ({"schedule": "zigzag"}, "schedule='zigzag' is not known"),
        ({"microbatches": 3, "replicas": 2}, "every replica takes the same number"),
        ({"stages": 1, "devices": ["cpu", "cpu"]}, "every rank needs a stage"),
        ({"costs": "guess"}, "must be 'estimate' or 'measure'"),
        ({"accumulate": "bfloat16"}, "accumulate=torch.bfloat16: must be 'float32', 'float64'"),
        ({"param_dtype": "int8"}, "param_dtype=torch.int8: must be 'bfloat16', 'float16'"),
        ({"param_dtype": "half a byte"}, "param_dtype='half a byte': must be 'bfloat16'"),
        ({"split_at": {"nothing": "begin"}}, "no module of that name"),
        ({"loss": 1}, r"loss=1: there are no results \[1\]"),
    ]
    before = copy.deepcopy(one.model.state_dict())
    for options, message in wrong:
        torch._dynamo.reset()
        with pytest.raises(ValueError, match=message):
            pfeife.compile(one.step, **options)(*batch)
    assert all(torch.equal(v, before[k]) for k, v in one.model.state_dict().items())
    assert all(parameter.grad is None for parameter in one.model.parameters())


def test_results_that_nobody_can_join_are_refused():
    one = case("GPT")

    def step(tokens, targets):
        loss = one.step(tokens, targets)
        return loss, loss.detach().sqrt()

    with pytest.raises(ValueError, match=r"no batch dimension.*reduce=\{1"):
        pfeife.compile(step, microbatches=2)(*one.batch(4))

    def two(tokens, targets):
        loss = one.step(tokens, targets)
        return loss, loss * 2

    with pytest.raises(ValueError, match="say which is the loss"):
        pfeife.compile(two, microbatches=2)(*one.batch(4))


def test_a_failure_of_a_stage_is_raised_with_its_place():
    one = case("GPT")
    step = pfeife.compile(one.step, microbatches=2, stages=2)
    tokens, targets = one.batch(4)
    with pytest.raises(IndexError) as caught:
        step(tokens + 100, targets)
    assert "on rank 0, in action 0F0" in caught.value.__notes__[0]
    assert step(tokens, targets).isfinite(), "the step works again afterwards"


def test_replicas_average():
    one = case("UNet")
    batch = one.batch(8)
    parts = list(zip(*(x.chunk(4) for x in batch), strict=True))
    expected = eager_accumulation(one.step, one.model, parts)
    loss = pfeife.compile(one.step, microbatches=4, stages=2, replicas=2)(*batch)
    loss.backward()
    found = pfeife.Result(
        loss.detach(), ({},) * 4, {n: p.grad for n, p in one.model.named_parameters()}, {}
    )
    assert_same(expected, found, rounding=None)


def same_as_eager(model, step, batch, count=2, tied=(), **options):
    """The compiled step's loss and gradients against accumulation over `count` parts."""
    torch._dynamo.reset()
    parts = list(zip(*(x.chunk(count) for x in batch), strict=True))
    expected = eager_accumulation(step, model, parts)
    loss = pfeife.compile(step, microbatches=count, **options)(*batch)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    found = pfeife.Result(loss.detach(), ({},) * count, gradients, {})
    assert_same(attrs.evolve(expected, buffers={}), found, tied)


def test_numbers_in_the_step_are_tensors_too():
    """A tensor made from numbers is a constant of the graph, read on every rank."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def step(x):
        h = model[0](x) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        h = torch.where(h > 0, h, torch.tensor(0.5))
        return model[1](h * torch.tensor(3.0)).square().mean()

    same_as_eager(model, step, (torch.randn(4, 4),), stages=2)


def test_names_that_python_fx_or_pfeife_use():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.loss = nn.Parameter(torch.randn(4))
            self.graph = nn.Parameter(torch.randn(4))
            self.p_type = nn.Linear(4, 4)

    model = Model()

    def step(input, seed, grad_loss):
        h = F.dropout(model.p_type(input) * model.loss + model.graph, 0.0)
        return (h * seed * grad_loss).square().mean()

    same_as_eager(model, step, tuple(torch.randn(4, 4) for _ in range(3)))

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.randn(4))

        def forward(self, x, scale):
            return (x * self.scale * scale).square().mean()

    scaled = Scaled()
    same_as_eager(scaled, scaled, (torch.randn(4, 4), torch.randn(4, 1)))
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    nets = nn.ModuleList([first, second])
    holders = [SimpleNamespace(net=first), SimpleNamespace(net=second)]

    def held(weight):
        return (holders[0].net(weight) + holders[1].net(weight).tanh()).square().mean()

    same_as_eager(nets, held, (torch.randn(4, 4),))


def test_what_would_be_silently_wrong_is_refused():
    one = case("GPT")
    tokens, targets = one.batch(4)
    model = nn.Linear(4, 4)
    x = torch.randn(4, 4)
    table = torch.randn(6)

    def twice(x):
        h = model(x)
        return h @ h.t()

    def count(x):
        return (model(x) > 0).float().sum().sqrt()

    with pytest.raises(ValueError, match="no batch dimension of its own"):
        pfeife.compile(twice, microbatches=2)(x)
    with torch.no_grad(), pytest.raises(ValueError, match="loss=0"):
        pfeife.compile(count, microbatches=2)(x)
    with pytest.raises(ValueError, match="say loss_reduction"):
        pfeife.compile(one.step, microbatches=2, reduce={0: "sum"})(tokens, targets)
    with pytest.raises(ValueError, match=r"no results \[7\]"):
        pfeife.compile(one.step, reduce={7: "sum"})(tokens, targets)
    with pytest.raises(ValueError, match="do not belong together"):
        pfeife.compile(lambda x, y: model(x).mean() + y.mean(), microbatches=2)(
            x, x[:, :2].repeat(2, 1)[:6]
        )
    with pytest.raises(ValueError, match="has no dimension 3"):
        pfeife.compile(lambda x: model(x).mean(), in_dims=3)(x)
    with pytest.raises(ValueError, match="closed-over tensor"):
        torch.compile(
            lambda x: (model(x) * table[:, None]).mean(),
            backend="pfeife", options={"microbatches": 2}, dynamic=True,
        )(torch.randn(6, 4))  # fmt: skip
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=2)
    leaf = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(step(leaf), leaf, create_graph=True)
    outside = pfeife.compile(model, microbatches=2)
    logits = outside(leaf)
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        logits.sum().backward()


@pytest.mark.parametrize("schedule", some(["search", "1f1b"]))
def test_the_memory_limit_holds_by_the_byte(schedule):
    """A search recomputes where it must, with the same bits; a family is refused."""
    one = case("GPT")
    microbatches = [one.batch(16, seed) for seed in range(4)]
    expected = eager_accumulation(one.step, one.model, microbatches)
    batch = [torch.cat(parts) for parts in zip(*microbatches, strict=True)]

    def compiled(limit: int | None):
        torch._dynamo.reset()
        step = pfeife.compile(
            one.step,
            microbatches=4,
            stages=2,
            schedule=schedule,
            search_seconds=1.0,
            memory_limit=limit,
        )
        one.model.zero_grad()
        step(*batch).backward()
        found = step.backend.compiled[0]
        return found.plan, max(c.peak for c in memory_curves(found.program, found.schedule))

    free, most = compiled(None)
    limit = 12 * most // 25  # a plan that recomputes nothing needs more
    if schedule == "1f1b":
        with pytest.raises(ValueError, match="bytes"):
            compiled(limit)
        return
    tight, peak = compiled(limit)
    assert peak <= limit and tight.recompute and not free.recompute
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter.grad, expected.gradients[name]), name


@pytest.mark.parametrize("way", ["compile", "dynamic", "keyword"])
def test_two_floats_are_two_programs(way):
    """A number that Python hands over is part of what is computed, at every call."""
    model = nn.Linear(4, 4)
    x = torch.randn(6, 4)

    def step(x, scale):
        return (model(x) * scale).square().mean()

    if way == "compile":
        compiled = pfeife.compile(step, microbatches=2)
    elif way == "dynamic":
        options = {"microbatches": 2}
        compiled = torch.compile(step, backend="pfeife", options=options, dynamic=True)
    else:
        compiled = pfeife.compile(lambda x, scale: step(x, scale=scale), microbatches=2)
    for scale in (2.0, 3.0, 2.0, -0.5):
        expected = sum(step(part, scale).detach() / 2 for part in x.chunk(2))
        assert torch.equal(compiled(x, scale), expected), scale


def test_two_dropouts_of_one_shape():
    """Each draws its own numbers."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Dropout(0.5), nn.Dropout(0.5)

        def forward(self, x):
            return self.first(x), self.second(x)

    model = Twice()
    found = pfeife.compile(model, microbatches=2)(torch.ones(8, 64))
    assert not torch.equal(*found)
    parts = torch.stack(found).unflatten(1, (2, 4)).flatten(0, 1)  # of each microbatch
    assert len({str(part.tolist()) for part in parts}) == 4


def test_a_step_that_is_compiled_again_says_why():
    """In the line of each program; the third time in a warning."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    log, lines = logging.getLogger("pfeife"), Lines()
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        step = pfeife.compile(lambda x: net(x).square().mean(), microbatches=2, stages=2)
        step(torch.ones(8, 8)).backward()
        with torch.no_grad():
            step(torch.ones(8, 8))
        net.eval()
        step(torch.ones(4, 8)).backward()
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(lines)
    texts = [text for text in map(logging.LogRecord.getMessage, lines.records)]
    texts = [text for text in texts if text.startswith("compiled ")]
    assert "(program" not in texts[0]
    assert "(program 2 of it, for gradients off (before: on))" in texts[1]
    assert "modules in evaluation (before: in training), x float32 [4, 8]" in texts[2]
    (warning,) = (one.getMessage() for one in lines.records if one.levelno == logging.WARNING)
    assert "is compiled for the third time: gradients off (before: on); gradients on" in warning
