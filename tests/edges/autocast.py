"""Autocast around the call of a step: the captured operations have their casts already."""

import copy
import os

import torch
from rows import row
from torch import nn

import pfeife
from pfeife.cost import measure
from pfeife.testing import eager_accumulation, own_gradients

STAGES = {} if "RANK" in os.environ else {"stages": 2}
CUT = {**STAGES, "split_at": {"c": "begin"}}


class Islands(nn.Module):
    """Linear layers, one of them in float32; its result is cast, or crosses the cut as it is."""

    def __init__(self, half: torch.dtype | None):
        super().__init__()
        self.half = half
        self.a, self.b, self.c, self.d = (nn.Linear(64, 64) for _ in "abcd")

    def forward(self, x):
        h = self.a(x).relu()
        with torch.autocast("cpu", enabled=False):
            h = self.b(h.float()).exp().log()
        h = h if self.half is None else h.to(self.half)
        return self.d(self.c(h).relu())

    def loss(self, x):
        return self(x).float().square().mean()


def batch():
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(3)) * 3


def under(dtype, step):
    """The step under autocast, as a script calls it; its backward runs outside."""

    def call(*args):
        with torch.autocast("cpu", dtype=dtype):
            return step(*args)

    return call


def same(model, found, expected):
    """The gradients that this rank has, and its loss, are eager's bits."""
    assert torch.equal(found.detach(), expected.loss), (found, expected.loss)
    mine = own_gradients(model)
    assert mine
    wrong = [name for name, g in mine.items() if not torch.equal(g, expected.gradients[name])]
    assert not wrong, wrong


def trained(dtype, half=None, **options):
    model = Islands(half)
    expected = eager_accumulation(
        under(dtype, model.loss), model, [(part,) for part in batch().chunk(2)]
    )
    step = pfeife.compile(model.loss, microbatches=2, **options)
    loss = under(dtype, step)(batch())
    loss.backward()
    same(model, loss, expected)


@row(ranks=(1, 2))
def a_float32_island_that_crosses_the_cut():
    trained(torch.bfloat16, **CUT)


@row(ranks=(1, 2))
def a_float32_island_within_a_stage():
    trained(torch.bfloat16, torch.bfloat16, **CUT)


@row(ranks=(1, 2))
def a_float32_island_under_float16():
    trained(torch.float16, **CUT)


@row(ranks=(1, 2))
def an_island_with_another_schedule():
    trained(torch.bfloat16, schedule="zb-h1", **CUT)


def watching(seen):
    """A compiler that notes whether it, and what it has made, runs under autocast."""

    def compiler(graph, examples):
        def run(*values):
            seen.append(torch.is_autocast_enabled("cpu"))
            return graph(*values)

        seen.append(torch.is_autocast_enabled("cpu"))
        return run

    return compiler


@row(ranks=(1, 2))
def an_island_in_compiled_stages():
    seen = []
    trained(torch.bfloat16, compiler=watching(seen), **CUT)
    assert seen and not any(seen)


@row()
def measured_costs():
    seen = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        clusters = pfeife.fuse()(pfeife.capture(Islands(None).loss, batch()))
        measure(clusters, repeats=1, compiler=watching(seen))
    assert seen and not any(seen)


@row(ranks=(1, 2))
def the_loss_outside():
    model = Islands(None)
    other = copy.deepcopy(model)
    out = under(torch.bfloat16, pfeife.compile(model, microbatches=2, **CUT))(batch())
    loss = out.float().square().mean()
    loss.backward()
    whole = torch.cat([under(torch.bfloat16, other)(part) for part in batch().chunk(2)])
    assert torch.equal(out, whole) and out.dtype == whole.dtype
    seen = whole.detach().requires_grad_()
    seen.float().square().mean().backward()
    for part, gradient in zip(batch().chunk(2), seen.grad.chunk(2), strict=True):
        under(torch.bfloat16, other)(part).backward(gradient)
    gradients = {name: p.grad for name, p in other.named_parameters()}
    same(model, loss, pfeife.Result(seen.float().square().mean().detach(), (), gradients, {}))


@row()
def capture_and_evaluate():
    model, parts = Islands(None), [(part,) for part in batch().chunk(2)]
    expected = eager_accumulation(under(torch.bfloat16, model.loss), model, parts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        program = pfeife.capture(model.loss, *parts[0])
        state = pfeife.state_of(program, model)
        results = [pfeife.evaluate(program, state, parts)]
        results.append(pfeife.evaluate(pfeife.fuse()(program), state, parts))
    for result in results:
        assert torch.equal(result.loss, expected.loss)
        for name, gradient in result.gradients.items():
            assert torch.equal(gradient, expected.gradients[name]), name


@row(refused="backward was called under autocast", ranks=(1, 2))
def a_backward_under_autocast():
    model = Islands(None)
    step = pfeife.compile(model.loss, microbatches=2, **CUT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(batch()).backward()
