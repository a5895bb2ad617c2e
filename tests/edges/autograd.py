"""What autograd promises to a loop: what it frees, what it checks, whom it calls."""

import copy
import gc
import os

import torch
from listening import said
from rows import row
from torch import nn

import pfeife
from pfeife.testing import eager_accumulation, own_gradients

STAGES = {} if "RANK" in os.environ else {"stages": 2}
TWO = {**STAGES, "microbatches": 2}
AGAIN = "Trying to backward through the graph a second time"
SCALARS = 64  # bytes that a step's small messages may still hold
CHANGED = "one of the variables needed for gradient computation has been modified"


def net(width=8):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Sigmoid())


def rows(width=8, seed=1):
    return torch.randn(4, width, generator=torch.Generator().manual_seed(seed))


def live():
    """Bytes of all tensors that Python knows, those in cycles of garbage too."""
    found = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    found = [t for t in found if not torch._C._functorch.is_functorch_wrapped_tensor(t)]  # views
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}.values())


def same(model, other):
    """The gradients that this rank has are those of the other model."""
    theirs = dict(other.named_parameters())
    mine = own_gradients(model)
    assert mine
    for name, gradient in mine.items():
        assert torch.equal(gradient, theirs[name].grad), name


def by_parts(model, x, gradient):
    """Plain accumulation of a model whose loss is outside."""
    for part, one in zip(x.chunk(2), gradient.chunk(2), strict=True):
        model(part).backward(one)


def loop(model, step):
    def once():
        loss = step(rows(64))
        loss.backward()
        model.zero_grad()
        return loss

    return once


@row(ranks=(1, 2), whole=(1,))
def a_loop_keeps_no_second_set_of_gradients():
    model = net(64)
    once = loop(model, pfeife.compile(lambda x: model(x).square().mean(), **TWO))
    for _ in range(2):  # receive buffers are made and kept
        once()
    gc.collect()
    before = live()
    loss = once()
    assert loss.nbytes and live() <= before + SCALARS


@row(ranks=(1, 2))
def kept_losses_are_small():
    model = net(64)
    once = loop(model, pfeife.compile(lambda x: model(x).square().mean(), **TWO))
    kept = [once() for _ in range(2)]
    before = live()
    kept += [once() for _ in range(8)]
    assert live() - before <= 8 * SCALARS


@row(ranks=(1, 2))
def activations_are_freed():
    """With the loss outside: by the backward, and with a result that is dropped without one."""
    model = net(64)
    compiled = pfeife.compile(model, **TWO)

    def run(backward):
        out = compiled(rows(64))
        if backward:
            out.sum().backward()
            model.zero_grad()
        return out

    size = run(True).nbytes
    gc.collect()
    before = live()
    out = run(True)
    assert live() <= before + size + SCALARS, "the backward has left something"
    del out
    out = run(False)
    assert live() > before + size + SCALARS, "nothing waits for a backward"
    del out
    assert live() <= before + SCALARS, "something has outlived the result"


@row(refused=AGAIN, ranks=(1, 2))
def a_second_backward():
    model = net()
    loss = pfeife.compile(lambda x: model(x).square().mean(), **TWO)(rows())
    loss.backward(retain_graph=True)
    once = {name: g.clone() for name, g in own_gradients(model).items()}
    loss.backward()
    for name, gradient in once.items():
        assert torch.equal(model.get_parameter(name).grad, 2 * gradient)
    loss.backward()


def place(tensor):
    return tensor.untyped_storage().data_ptr()


@row(ranks=(1, 2))
def gradients_are_handed_out_without_copies():
    """They are what autograd has saved, multiplied in its place; those of replicas stay parts of
    their buckets."""
    model = net()
    parts = [(part,) for part in rows().chunk(2)]
    expected = eager_accumulation(lambda x: model(x).square().mean(), model, parts).gradients

    def check(factor, **options):
        other = copy.deepcopy(model)
        step = pfeife.compile(lambda x: other(x).square().mean(), microbatches=2, **options)
        loss = step(rows())
        saved = {place(one) for one in loss.grad_fn.saved_tensors}
        (loss * factor).backward()
        assert own_gradients(other)
        for name, gradient in own_gradients(other).items():
            assert place(gradient) in saved, name
            torch.testing.assert_close(gradient, expected[name] * factor)

    check(1, **STAGES)
    check(3, **STAGES)
    check(3, replicas=int(os.environ.get("WORLD_SIZE", 1)))


@row(ranks=(1, 2))
def what_was_handed_out_is_the_callers():
    """While the graph is kept, it is a copy: another backward has what was saved."""
    model = net()
    loss = pfeife.compile(lambda x: model(x).square().mean(), **TWO)(rows())
    model[0].weight.register_hook(lambda gradient: gradient.mul_(2))
    loss.backward(retain_graph=True)
    once = {name: g.clone() for name, g in own_gradients(model).items()}
    for gradient in own_gradients(model).values():
        gradient.zero_()
    loss.backward()
    for name, gradient in own_gradients(model).items():
        assert torch.equal(gradient, once[name]), name


@row(ranks=(1, 2))
def a_retained_graph():
    """With the loss outside there is one backward: a second one says so."""
    model = net()
    out = pfeife.compile(model, **TWO)(rows())
    out.sum().backward(retain_graph=True)
    for words, retain in ((AGAIN, False), ("backward ran a second time", True)):
        other = pfeife.compile(model, **TWO)(rows())
        other.sum().backward(retain_graph=retain)
        try:
            other.sum().backward()
        except RuntimeError as error:
            assert str(error).startswith(words), error
        else:
            raise AssertionError("not refused")


@row(ranks=(1, 2))
def a_detached_result():
    model = net()

    def step(x):
        h = model(x)
        return h.square().mean(), h.detach()

    expected = torch.cat([model(part) for part in rows().chunk(2)])
    loss, h = pfeife.compile(step, **TWO)(rows())
    assert not h.requires_grad and loss.requires_grad
    assert torch.equal(h, expected)
    h.numpy()


@row(ranks=(1, 2))
def a_detached_result_with_the_loss_outside():
    model = net()

    def call(x):
        h = model(x)
        return h, h.detach() * 2

    out, h = pfeife.compile(call, **TWO)(rows())
    assert not h.requires_grad and out.requires_grad


@row(refused=CHANGED, ranks=(1, 2))
def the_batch_is_changed_in_between():
    x = rows()
    out = pfeife.compile(net(), **TWO)(x)
    x.zero_()
    out.sum().backward()


@row(ranks=(2,))
def one_ranks_batch_is_changed_in_between():
    """The other rank does not wait for a backward that does not come."""
    x, rank = rows(), int(os.environ.get("RANK", 0))
    out = pfeife.compile(net(), **TWO)(x)
    if rank == 0:
        x.zero_()
    try:
        out.sum().backward()
    except RuntimeError as error:
        assert str(error).startswith(CHANGED if rank == 0 else "rank 0, the gradients"), error
    else:
        raise AssertionError("not refused")


@row(refused=CHANGED, ranks=(1, 2))
def a_batch_that_is_saved_as_a_view():
    x = rows().reshape(4, 2, 4)
    out = pfeife.compile(net(4), **TWO)(x)
    x.zero_()
    out.sum().backward()


@row(refused=CHANGED, ranks=(1, 2))
def a_weight_that_is_saved_in_parts():
    first, weight = nn.Linear(8, 8), nn.Parameter(torch.randn(2, 8, 8))
    out = pfeife.compile(lambda x: first(x).tanh() @ weight.unbind()[1], **TWO)(rows())
    with torch.no_grad():
        weight.zero_()
    out.sum().backward()


@row(refused=CHANGED, ranks=(1, 2))
def a_weight_is_changed_in_between():
    model = net()
    out = pfeife.compile(model, **TWO)(rows())
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.mul_(2)
    out.sum().backward()


@row(ranks=(1, 2))
def what_no_backward_reads_is_changed_in_between():
    model, other = net(), net()
    other.load_state_dict(model.state_dict())
    shift = rows(seed=2)
    out = pfeife.compile(lambda x, y: model(x) + y, **TWO)(rows(), shift)
    with torch.no_grad():
        shift.zero_()
        for layer in (model[0], model[2]):
            layer.bias.add_(1)
    out.sum().backward()
    by_parts(other, rows(), torch.ones(4, 8))
    same(model, other)


@row(ranks=(1, 2))
def an_uncut_result_is_changed_in_between():
    """Eager refuses it, because its backward reads the result itself; ours reads another copy."""
    model = net()
    other = copy.deepcopy(model)
    out = torch.compile(model, backend="pfeife", options=STAGES)(rows())
    with torch.no_grad():
        out.mul_(2)
    out.sum().backward()
    other(rows()).sum().backward()
    same(model, other)


@row(ranks=(2,))
def a_hook_of_another_ranks_parameter():
    model, seen = net(), {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.setdefault(name, gradient))
    step = pfeife.compile(lambda x: model(x).square().mean(), **TWO)
    step(rows()).backward()
    mine = own_gradients(model).keys()
    assert set(seen) == mine and all(gradient is not None for gradient in seen.values())


@row(ranks=(1, 2))
def hooks_of_parameters_are_announced():
    model, calls = net(), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter))
    with said() as found:
        step = pfeife.compile(lambda x: model(x).square().mean(), **TWO)
        for _ in range(2):
            step(rows()).backward()
    mine = own_gradients(model)
    assert len(calls) == 2 * len(mine)
    assert len([text for text in found if "run once a call" in text]) == bool(mine)


@row(ranks=(2,))
def an_eager_encoder_before_a_compiled_model():
    encoder, model = nn.Linear(8, 8), net()
    others = copy.deepcopy(encoder), copy.deepcopy(model)
    out = pfeife.compile(model, **TWO)(encoder(rows()))
    out.square().mean().backward()
    code = others[0](rows())
    seen = code.detach().requires_grad_()
    whole = torch.cat([others[1](part) for part in seen.chunk(2)]).detach().requires_grad_()
    whole.square().mean().backward()
    by_parts(others[1], seen, whole.grad)
    code.backward(seen.grad)
    same(model, others[1])
    same(encoder, others[0])


@row(ranks=(1, 2))
def a_rank_that_trains_nothing():
    """Its loss has a backward all the same, and no parameter of the others gets anything."""
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    model["b"].requires_grad_(False)
    step = pfeife.compile(
        lambda x: model["b"](model["a"](x).tanh()).square().mean(),
        split_at={"b": "begin"},
        **TWO,
    )
    expected = eager_accumulation(
        lambda x: model["b"](model["a"](x).tanh()).square().mean(),
        model,
        [(part,) for part in rows().chunk(2)],
    )
    loss = step(rows())
    loss.backward()
    assert torch.equal(loss, expected.loss)
    try:
        loss.backward()
    except RuntimeError as error:
        assert str(error).startswith(AGAIN)
    else:
        raise AssertionError("not refused")


def rank() -> int:
    return int(os.environ["RANK"])


@row("since the last call of a step rank 0 has called backward 1 times, and rank 1 0 times", (2,))
def a_backward_on_one_rank():
    model = net()
    step = pfeife.compile(lambda x: model(x).square().mean(), **TWO)
    for _ in range(2):
        loss = step(rows())
        if rank() == 0:
            loss.backward()


@row("the loss of the last call was given the gradient 1 on rank 0 and 2 on rank 1", (2,))
def a_loss_that_ranks_scale_otherwise():
    model = net()
    step = pfeife.compile(lambda x: model(x).square().mean(), **TWO)
    for _ in range(2):
        (step(rows()) * (1 + rank())).backward()


@row(ranks=(2,))
def an_optimizer_of_what_a_rank_trains():
    """It sets the gradients of this rank alone to None."""
    model, other = net(), net()
    other.load_state_dict(pfeife.full_state_dict(model))
    step = pfeife.compile(lambda x: model(x).square().mean(), **TWO)
    optimizer, plain = None, torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(3):
        step(rows()).backward()
        eager_step = eager_accumulation(
            lambda x: other(x).square().mean(), other, [(part,) for part in rows().chunk(2)]
        )
        for name, parameter in other.named_parameters():
            parameter.grad = eager_step.gradients[name]
        own = [dict(model.named_parameters())[name] for name in own_gradients(model)]
        optimizer = optimizer or torch.optim.SGD(own, lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
    torch.testing.assert_close(pfeife.full_state_dict(model), dict(other.state_dict()))
