"""What a compiled call gives back: results, their gradients, and what arrives at the loss."""

import copy

import pytest
import torch
import torch.nn.functional as F
from models import CASES, case
from torch import nn

import pfeife
from pfeife.testing import eager_accumulation


def test_the_loss_outside_fills_and_drains():
    one = case("GPT")
    model = pfeife.compile(one.model, microbatches=2, stages=2)
    tokens, targets = one.batch(4)
    logits = model(tokens)
    seen = logits.detach().clone().requires_grad_()
    loss = F.cross_entropy(seen.flatten(0, 1), targets.flatten())
    loss.backward()
    logits.backward(seen.grad)
    with pytest.raises(RuntimeError, match="a second time"):
        logits.backward(seen.grad)
    ours = {n: p.grad for n, p in one.model.named_parameters()}
    other = CASES["GPT"](copy.deepcopy(one.model)).model
    other.zero_grad()
    for rows, gradient in zip(tokens.chunk(2), seen.grad.chunk(2), strict=True):
        other(rows).backward(gradient)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter.grad, ours[name]), name


def test_the_gradient_is_scaled_by_what_arrives():
    one = case("GPT")
    step = pfeife.compile(one.step, microbatches=2, stages=2, devices=["cpu", "cpu"])
    batch = one.batch(4)
    step(*batch).backward()
    once = {n: p.grad.clone() for n, p in one.model.named_parameters()}
    one.model.zero_grad()
    (4 * step(*batch)).backward()
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter.grad, 4 * once[name]), name


def test_other_results_are_joined():
    one = case("BatchNormNet")

    def step(x, kinds):
        logits = one.model(x)
        right = (logits.argmax(-1) == kinds).float().mean()
        return F.cross_entropy(logits, kinds), logits, right

    x, kinds = one.batch(6)
    loss, logits, right = pfeife.compile(step, microbatches=3, stages=2, reduce={2: "mean"})(
        x, kinds
    )
    with pytest.raises(RuntimeError, match="result 1 of the step received a gradient"):
        (loss + logits.sum()).backward()
    torch.manual_seed(0)
    parts = [(x.chunk(3)[i], kinds.chunk(3)[i]) for i in range(3)]
    expected = [step(*part) for part in parts]
    assert torch.equal(logits, torch.cat([e[1] for e in expected]))
    torch.testing.assert_close(right, (logits.argmax(-1) == kinds).float().mean())


def test_without_gradients_only_forwards_run():
    one = case("BatchNormNet")
    one.model.eval()
    step = pfeife.compile(one.step, microbatches=2, stages=2, loss=0)
    batch = one.batch(4)
    with torch.no_grad():
        loss = step(*batch)
        halves = [one.step(*part) / 2 for part in zip(*(x.chunk(2) for x in batch), strict=True)]
    assert torch.equal(loss, halves[0] + halves[1])
    (compiled,) = step.backend.compiled
    assert {str(a.do) for rank in compiled.schedule.ranks for a in rank} <= {
        "F",
        "SEND_F",
        "RECV_F",
    }


def test_gradients_of_batch_inputs():
    model = nn.Linear(3, 3)
    x = torch.randn(4, 3, requires_grad=True)

    def step(x):
        return model(x).square().mean()

    pfeife.compile(step, microbatches=2)(x).backward()
    found, x.grad = x.grad, None
    sum(step(part) / 2 for part in x.chunk(2)).backward()
    assert torch.equal(found, x.grad)


def test_results_that_share_storage_keep_their_gradients():
    model = nn.Linear(4, 4)
    x = torch.randn(4, 4)
    for results in (
        lambda h: (h, h.view(-1, 2, 2)),
        lambda h: (h, h[:, 0]),
        lambda h: (h[:, :2], h[:, 2:]),
    ):
        torch._dynamo.reset()

        def call(x, results=results):
            return results(model(x))

        found = pfeife.compile(call, microbatches=2)(x)
        sum(result.square().sum() for result in found).backward()
        gradient, model.weight.grad = model.weight.grad, None
        sum(result.square().sum() for result in call(x)).backward()
        torch.testing.assert_close(gradient, model.weight.grad)
        model.zero_grad()


def test_a_scalar_that_is_not_the_loss():
    """A router's loss beside the logits: the loss of both is outside."""
    model = nn.Linear(4, 4)
    x = torch.randn(4, 4)

    def call(x):
        h = model(x)
        return h, h.square().mean()

    logits, router = pfeife.compile(call, microbatches=2, loss="outside", reduce={1: "mean"})(x)
    (logits.exp().mean() + 0.1 * router).backward()
    found, model.weight.grad = model.weight.grad, None
    logits, router = call(x)
    (logits.exp().mean() + 0.1 * router).backward()
    torch.testing.assert_close(found, model.weight.grad)


def test_a_tied_weight_with_a_gradient_from_outside():
    """Two stages and the caller each have a term of one gradient: none gets lost."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return (x @ self.w).tanh() @ self.w, self.w.clone()

    model, x = Model(), torch.randn(4, 4)
    found = []
    for call in (pfeife.compile(model, stages=3), model):
        h, w = call(x)
        (h.sum() + 3 * w.square().sum()).backward()
        found.append(model.w.grad)
        model.w.grad = None
    torch.testing.assert_close(*found)


def test_replicas_with_the_loss_outside_add_up():
    model = nn.Linear(4, 4)
    x = torch.randn(8, 4, requires_grad=True)
    for inside in (True, False):
        torch._dynamo.reset()
        call = (lambda x: model(x).square().mean()) if inside else model
        loss = pfeife.compile(call, microbatches=4, replicas=2)(x)
        (loss if inside else loss.square().mean()).backward()
        found = [p.grad for p in (x, model.weight)]
        x.grad = model.weight.grad = model.bias.grad = None
        model(x).square().mean().backward()
        for one, other in zip(found, (x, model.weight), strict=True):
            torch.testing.assert_close(one, other.grad)
            other.grad = None
        model.bias.grad = None


def test_two_calls_before_their_backwards():
    """The second updates the statistics that the backward of the first has its own values of."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    other = copy.deepcopy(model)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    compiled = pfeife.compile(model, microbatches=2, stages=2)
    (compiled(x) + compiled(y)).sum().backward()
    parts = [other(part) for whole in (x, y) for part in whole.chunk(2)]
    torch.cat(parts).sum().backward()
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, another.grad)
    assert torch.equal(model[1].running_mean, other[1].running_mean)


def test_a_weight_used_twice_under_autocast():
    """The README's exception: every use is cast, as in eager without its cache of casts."""
    model = nn.Linear(16, 16)

    def step(x, cache=True):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            return model(model(x).relu()).float().square().mean()

    x = torch.randn(4, 16)
    parts = [(part, False) for part in x.chunk(2)]
    expected = eager_accumulation(step, model, parts)
    loss = pfeife.compile(step, microbatches=2)(x)
    loss.backward()
    assert torch.equal(loss, expected.loss)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected.gradients[name]), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_parameter_without_influence(dtype, replicas):
    """Its gradient is zero in eager mode, of its own dtype, beside others of another dtype."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    scale = nn.Parameter(torch.ones(4, dtype=dtype))

    def step(x):
        return (model(x) + (scale * 0).float()).square().mean()

    x = torch.randn(8, 4)
    sum(step(part) / 4 for part in x.chunk(4)).backward()
    expected, scale.grad = scale.grad, None
    pfeife.compile(step, microbatches=4, replicas=replicas)(x).backward()
    assert scale.grad.dtype == dtype and torch.equal(scale.grad, expected)


@pytest.mark.parametrize("capture", ["auto", "trace"])
def test_a_cut_that_a_step_cannot_take_says_what_a_microbatch_has(capture, capfd):
    """Rather than torch's log with the frames of every level, twice."""
    net = nn.Linear(8, 1)
    step = pfeife.compile(
        lambda x, more: (net(x) + more).square().mean(),
        **{"microbatches": 2, "stages": 1, "in_dims": (0, 1), "capture": capture},
    )
    words = r"A microbatch has x \[2, 8\] of \[4, 8\], more \[4, 2\] of \[4, 4\]; .*in_dims"
    with pytest.raises(ValueError, match=words if capture == "auto" else "broadcast"):
        step(torch.ones(4, 8), torch.ones(4, 4))
    assert "Traceback" not in capfd.readouterr().err
