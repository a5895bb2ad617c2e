"""What cannot be is said in words: what was found, where, and what to do."""

import torch
from rows import row
from torch import nn
from torch.utils.checkpoint import checkpoint

import pfeife
from edges.batch import net, rows, same


@row("the step does more than to compute its results (it prints, asserts or calls out:")
def an_effect_in_the_step():
    model = net()

    def step(x):
        torch._higher_order_ops.print("a step of {} rows", x.shape[0])
        return model(x).square().mean()

    pfeife.compile(step, microbatches=2)(rows())


@row("input x is a nested tensor, which has no rows of equal size to cut")
def a_jagged_batch_with_the_named_backend():
    model = net()
    x = torch.nested.nested_tensor([rows(2), rows(3)], layout=torch.jagged)
    options = {"microbatches": 2}
    torch.compile(lambda x: model(x).mean(), backend="pfeife", options=options, dynamic=True)(x)


@row("microbatches=2, but the step is given no tensor that could be cut")
def a_step_without_a_batch():
    model, x = net(), rows()
    pfeife.compile(lambda: model(x).square().mean(), microbatches=2)()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.scale = net(), 0.5

    def forward(self, x):
        return self.net(x) * self.scale


@row()
def a_float_in_a_checkpoint_with_dynamic():
    """torch up to 2.13 makes a tensor of it, which the checkpointed part asks for its number."""
    model = Scaled()

    def step(x):
        return checkpoint(model, x, use_reentrant=False).square().mean()

    options = {"microbatches": 2}
    compiled = torch.compile(step, backend="pfeife", options=options, dynamic=True)
    same(compiled, step, model, (rows(6),), [(p,) for p in rows(6).chunk(2)])


@row()
def a_float_in_a_checkpoint():
    model = Scaled()

    def step(x):
        return checkpoint(model, x, use_reentrant=False).square().mean()

    parts = [(p,) for p in rows().chunk(2)]
    same(pfeife.compile(step, microbatches=2), step, model, (rows(),), parts)


@row(ranks=(1, 2))
def a_branch_of_torch_cond():
    model = net()

    def step(x):
        h = model(x)
        return torch.cond(h.sum() > 0, lambda h: h.mean(), lambda h: -h.square().mean(), (h,))

    parts = [(p,) for p in rows().chunk(2)]
    same(pfeife.compile(step, microbatches=2), step, model, (rows(),), parts)


class Place:
    """What a step returns and torch does not look into."""


PLACE = Place()


def opaque(model, x):
    return model(x).square().mean(), PLACE


@row("loss='loss': the step returns an object whose tensors have no names for Pfeife")
def a_name_in_an_object():
    model = net()
    pfeife.compile(lambda x: opaque(model, x), microbatches=2, loss="loss")(rows())


@row("option reduce: there are no results [5]")
def an_index_beyond_an_object():
    model = net()
    options = {"reduce": {5: "mean"}}
    pfeife.compile(lambda x: opaque(model, x), microbatches=2, **options)(rows())


@row("loss='scores': result 'scores' is no differentiable scalar; those are ['loss']")
def a_loss_that_is_no_scalar():
    model = net()

    def step(x):
        scores = model(x)
        return {"loss": scores.square().mean(), "scores": scores}

    pfeife.compile(step, microbatches=2, loss="scores")(rows())


@row("result 1 of the step is")
def a_size_among_the_results_by_name():
    model = net()
    options = {"microbatches": 2}
    step = torch.compile(
        lambda x: (model(x).square().mean(), x.shape[0] * 2),
        backend="pfeife",
        options=options,
        dynamic=True,
    )
    step(rows(6))


@row("microbatch: input x with 6 rows does not divide into 4 microbatches; pass microbatches=3")
def a_batch_that_does_not_divide_by_name():
    model = net()
    options = {"microbatches": 4}
    torch.compile(
        lambda x: model(x).square().mean(), backend="pfeife", options=options, dynamic=True
    )(rows(6))


@row("step(): too many positional arguments")
def more_arguments_than_the_step_takes():
    model = net()

    def step(x):
        return model(x).square().mean()

    step.__qualname__ = "step"
    pfeife.compile(step, microbatches=2)(rows(), rows())


@row("steps is a generator or async")
def a_step_that_yields():
    def steps(x):
        yield x.sum()

    steps.__qualname__ = "steps"
    pfeife.compile(steps, microbatches=2)


@row("in_dims does not fit the arguments of the step")
def in_dims_of_another_structure():
    model = net()
    step = pfeife.compile(lambda x: model(x).square().mean(), in_dims=(0, 0), microbatches=2)
    step(rows())


def a_number_of(door):
    model = net()

    def step(x):
        loss = model(x).square().mean()
        return loss, loss.item()

    pfeife.compile(step, microbatches=2, capture=door)(rows(8))


@row("result 1 of the step is a number that it reads from a tensor, as `.item()` does")
def a_number_that_is_read():
    a_number_of("dynamo")


@row("the step returns a number that it reads from a tensor, as `.item()` does")
def a_number_that_is_read_in_a_trace():
    a_number_of("trace")
