"""A step that Dynamo breaks into several graphs: what eager computes, and what is said of it."""

import copy
import logging
import os
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from rows import row
from torch import nn

import pfeife

OPTIONS = {"microbatches": 2, "stages": 2}


def layers(count: int = 3, width: int = 8) -> nn.Sequential:
    pairs = [(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def rows(seed: int, count: int = 4, width: int = 8) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@contextmanager
def logged():
    """The lines of pfeife's log meanwhile, also those of ranks that log at DEBUG."""
    log, found = logging.getLogger("pfeife"), []
    handler, level = logging.Handler(logging.DEBUG), log.level
    handler.emit = lambda record: found.append((record.levelno, record.getMessage()))
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def trains_as_eager(make, step, batches=(1, 2), **options):
    """Some steps of a loop: the losses and the state of eager on the whole batch, on every rank.
    `step` takes the model and a batch."""
    torch.manual_seed(0)
    model = make()
    other = copy.deepcopy(model)
    backend = pfeife.backend(**OPTIONS | options)
    compiled = torch.compile(lambda x: step(model, x), backend=backend, dynamic=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other)]
    with logged() as lines:
        for seed in batches:
            loss, expected = compiled(rows(seed)), step(other, rows(seed))
            torch.testing.assert_close(loss, expected)
            loss.backward()
            expected.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for name, value in pfeife.full_state_dict(model).items():
        torch.testing.assert_close(value, other.state_dict()[name], msg=name)
    return [text for _, text in lines if "compiled " in text]


@row(ranks=(1, 2))
def two_graphs_that_are_both_pipelined():
    def step(model, x):
        h = model[:6](x)
        torch._dynamo.graph_break()
        return F.mse_loss(model[6:](h), x)

    said = trains_as_eager(lambda: layers(6), step)
    assert "2 stages on 2 ranks, 2 microbatches of 2 rows; of the step's 1 graphs" in said[0], said
    assert "of the step's 2 graphs so far 2 are pipelined, 100 % of" in said[1], said
    assert len(said) == 2, "every graph is built once"


@row(ranks=(1,))
def graphs_in_microbatches_have_the_numbers_of_accumulation():
    """Bit for bit: each graph is accumulated over its own microbatches."""
    model = layers(6)

    def step(x):
        h = model[:6](x)
        torch._dynamo.graph_break()
        return F.mse_loss(model[6:](h), x)

    loss = torch.compile(step, backend="pfeife", options=OPTIONS, dynamic=True)(rows(1))
    loss.backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    h = torch.cat([model[:6](part) for part in rows(1).chunk(2)])
    pairs = zip(h.chunk(2), rows(1).chunk(2), strict=True)
    parts = [F.mse_loss(model[6:](one), part) / 2 for one, part in pairs]
    expected = parts[0] + parts[1]
    expected.backward()
    assert torch.equal(loss, expected)
    assert all(torch.equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))


@row(ranks=(1, 2))
def a_loss_after_all_graphs():
    @torch.compiler.disable
    def loss(y, x):
        return (y - x).square().mean()

    said = trains_as_eager(lambda: layers(4), lambda model, x: loss(model(x), x))
    assert len(said) == 1, said


@row(ranks=(1, 2))
def a_value_that_python_asks_for():
    """Two branches on values, a size and a number that go from graph to graph."""

    def step(model, x):
        h = model[:4](x)
        rows, scale = h.shape[0], h.detach().abs().max().item()
        if scale > 0.5:
            h = h / scale
        torch._dynamo.graph_break()
        h = model[4:](h).reshape(rows, -1)
        return h.square().sum() / rows + h.abs().mean()

    trains_as_eager(lambda: layers(5), step)


@row(ranks=(1, 2))
def a_weight_that_two_graphs_share():
    def make():
        model = layers(4)
        model[6].weight = model[0].weight
        return model

    def step(model, x):
        h = model[:4](x)
        torch._dynamo.graph_break()
        return F.mse_loss(model[4:](h), x)

    trains_as_eager(make, step)


@row(ranks=(1, 2))
def parameters_that_no_graph_has():
    """Every rank trains alike what runs between the graphs."""
    run = torch.compiler.disable(lambda layer, h: layer(h))

    def step(model, x):
        h = run(model[4], model[:4](x))
        return F.mse_loss(model[5:](h), x)

    trains_as_eager(lambda: layers(5), step)


@row(ranks=(1, 2), whole=(1,))
def rows_that_depend_on_one_another():
    """The second graph runs with one microbatch: cut, it would be another function."""

    def step(model, x):
        h = model[:4](x)
        torch._dynamo.graph_break()
        h = model[4:]((h - h.mean(0)) / (1 + h.var(0)))
        torch._dynamo.graph_break()
        return h.square().mean()

    said = trains_as_eager(lambda: layers(7), step)
    assert "rows of ['h'] (dimension 0) depend on one another" in said[1], said


@row(ranks=(1, 2))
def negatives_from_the_batch():
    def step(model, x):
        h = F.normalize(model(x), dim=1)
        torch._dynamo.graph_break()
        return F.cross_entropy(h @ h.t() / 0.1, torch.arange(h.shape[0]))

    trains_as_eager(lambda: layers(4), step)


@row(ranks=(1, 2), whole=(1,))
def many_values_that_go_from_graph_to_graph():
    def step(model, x):
        found = [x]
        for layer in model[:6]:
            found.append(layer(found[-1]))
        torch._dynamo.graph_break()
        return sum(F.mse_loss(h, x) for h in found) + model[6:](found[-1]).square().mean()

    trains_as_eager(lambda: layers(5), step)


@row(ranks=(1, 2), whole=(1,))
def two_results_that_are_both_differentiated():
    """A scalar among the results of a graph is not its loss."""

    def step(model, x):
        h = model[:4](x)
        penalty = h.square().mean()
        torch._dynamo.graph_break()
        return F.mse_loss(model[4:](h), x) + 0.1 * penalty

    trains_as_eager(lambda: layers(5), step)


class Block(nn.Module):
    """A break inside, and parameters of its own."""

    def __init__(self):
        super().__init__()
        self.scale, self.net = nn.Parameter(torch.ones(8)), layers(2)

    def forward(self, x):
        h = self.net[:2](x * self.scale)
        torch._dynamo.graph_break()
        return x + self.net[2:](h) * self.scale


@row(ranks=(1, 2))
def breaks_inside_of_modules():
    trains_as_eager(
        lambda: nn.Sequential(Block(), Block()), lambda model, x: F.mse_loss(model(x), x)
    )


@row(ranks=(1, 2))
def modules_of_one_class_that_share_a_graph():
    """Dynamo does not break the loop's function, it leaves it to Python, and compiles the blocks
    once: each has parameters of its own."""

    class Plain(Block):
        def forward(self, x):
            return x + self.net(x * self.scale)

    def step(model, x):
        try:
            for block in model:
                x = block(x)
                torch._dynamo.graph_break()
        finally:
            del model
        return x.square().mean()

    trains_as_eager(lambda: nn.ModuleList([Plain() for _ in range(3)]), step)


@row(ranks=(1, 2))
def a_small_module_in_a_function_that_is_left_to_python():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 8)

        def forward(self, x):
            return self.net(x)

    def step(model, x):
        try:
            h = model[0](x)
            torch._dynamo.graph_break()
        finally:
            x = x + 1
        return F.mse_loss(model[1](h), x)

    said = trains_as_eager(lambda: nn.ModuleList([Small(), Small()]), step)
    assert "only 1 clusters" in said[0], said


@row(ranks=(1, 2))
def a_graph_without_parameters():
    """On ranks all of them compute it: its inputs are there, and nothing is sent."""

    def step(model, x):
        h = model(x)
        torch._dynamo.graph_break()
        return F.log_softmax(h.float(), -1).gather(1, x[:, :1].sign().long().abs()).neg().mean()

    said = trains_as_eager(lambda: layers(4), step)
    assert "runs whole, since it has no parameters" in said[1], said


@row("between two graphs of the step a tensor that step has returned or was given was changed")
def a_write_between_graphs_that_another_result_sees():
    model = layers(6)

    @torch.compiler.disable
    def write(h):
        h.add_(1)

    def step(x):
        h = model[:6](x)
        looks = h.view(-1)
        write(h)
        return model[6:](looks.view_as(x)).square().mean()

    with torch.no_grad():
        torch.compile(step, backend="pfeife", options=OPTIONS, dynamic=True)(rows(1))


@row(ranks=(1, 2), whole=(1,))
def an_evaluation_before_and_after():
    torch.manual_seed(0)
    model = layers(6)
    other = copy.deepcopy(model)

    def step(model, x):
        h = model[:6](x)
        torch._dynamo.graph_break()
        return F.mse_loss(model[6:](h), x)

    compiled = torch.compile(
        lambda x: step(model, x), backend=pfeife.backend(**OPTIONS), dynamic=True
    )
    for seed in range(2):
        with torch.no_grad():
            torch.testing.assert_close(compiled(rows(seed)), step(other, rows(seed)))
        for one, run in ((model, compiled), (other, lambda x: step(other, x))):
            run(rows(seed)).backward()
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            one.zero_grad()


@row(ranks=(1, 2), whole=(1,))
def gpt2_as_transformers_ships_it():
    """A call of its logger breaks the step before the loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    other = copy.deepcopy(model)
    model.compile(backend="pfeife", options=OPTIONS, dynamic=True)
    with logged() as lines:
        for seed in (1, 2):
            torch.manual_seed(seed)
            tokens = torch.randint(32, (4, 6))
            for one in (model, other):
                one(input_ids=tokens, labels=tokens).loss.backward()
                torch.optim.SGD(one.parameters(), lr=0.1).step()
                one.zero_grad()
    for name, value in pfeife.full_state_dict(model).items():
        torch.testing.assert_close(value, other.state_dict()[name], msg=name)
    said = [text for _, text in lines if "compiled " in text]
    assert "2 stages on 2 ranks" in said[0] and "2 graphs so far 1 are pipelined" in said[1], said


@row(ranks=(1, 2))
def a_frozen_graph_and_a_trained_one():
    def step(model, x):
        h = model[:6](x)
        torch._dynamo.graph_break()
        return F.mse_loss(model[6:](h), x)

    def make():
        model = layers(6)
        model[:6].requires_grad_(False)
        return model

    said = trains_as_eager(make, step)
    assert "of the step's 2 graphs so far 2 are pipelined" in said[1], said


@row(ranks=(1, 2), whole=(1,))
def a_break_that_costs_most_of_the_time_is_named():
    model = layers(3)

    def step(x):
        h = model[:2](x)
        torch._dynamo.graph_break()
        h = h - h.mean(0)
        for _ in range(20):
            h = model[2](h) - h.mean(0)
        return h.square().mean()

    compiled = torch.compile(step, backend="pfeife", options=OPTIONS, dynamic=True)
    with logged() as lines:
        for _ in range(2):
            compiled(rows(1)).backward()
    warned = [text for level, text in lines if level == logging.WARNING and "the break" in text]
    assert len(warned) == (os.environ.get("RANK", "0") == "0"), warned
    for text in warned:
        assert f'Call to `torch._dynamo.graph_break()` (File "{__file__}", line' in text, text


@row("option on_step: step is broken into several graphs, each with figures of its own")
def figures_of_a_step_that_is_broken():
    model, seen = layers(), []

    def step(x):
        h = model(x)
        torch._dynamo.graph_break()
        return h.square().mean()

    given = {**OPTIONS, "on_step": seen.append}
    torch.compile(step, backend="pfeife", options=given, dynamic=True)(rows(1))
