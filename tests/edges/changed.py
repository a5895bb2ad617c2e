"""Steps that change their arguments in place: the caller's tensors are afterwards as eager leaves
them, and the program computes with the old and the new values where eager does."""

import copy
import os

import torch
import torch.nn.functional as F
from rows import row
from torch import nn

import pfeife
from pfeife.testing import own_gradients

STAGES = {"stages": 2} if "RANK" not in os.environ else {}
PAD = 0


class Masking(nn.Module):
    """A loss that writes to its labels, as several of transformers' do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))

    def forward(self, x, labels):
        labels[labels == PAD] = -100
        return F.cross_entropy(self.layers(x), labels)


class Inputs(Masking):
    """Floating inputs and parts of them, and the old value is read, too."""

    def forward(self, x, labels):
        x.add_(torch.sigmoid(x)).relu_()
        x[:, :2].mul_(2)
        labels.clamp_(0, 3)
        return F.cross_entropy(self.layers(x), labels)


class Branching(Masking):
    """What only a trace takes. It makes something ready in its first run, which is one more."""

    ready = None

    def forward(self, x, labels):
        if self.ready is None:
            self.ready = torch.ones(6)
        x.add_(self.ready)
        labels[labels == PAD] = -100
        if (labels < 5).all():
            return F.cross_entropy(self.layers(x), labels)
        return self.layers(x).sum()


def data(seed=3):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor([0, 1, 2, 3, 0, 4, 1, 2])  # each microbatch has as many that count
    return torch.randn(8, 6, generator=generator), labels


def accumulated(model, x, labels, trains=True):
    """One device's loss, over microbatches that are views of the batch."""
    losses = []
    for part in zip(x.chunk(2), labels.chunk(2), strict=True):
        loss = model(*part) / 2
        if trains:
            loss.backward()
        losses.append(loss.detach())
    return sum(losses)


def same(model, **options):
    """Three calls, the third with what the second one has left, and one without gradients."""
    other = copy.deepcopy(model)
    step = pfeife.compile(model, microbatches=2, **STAGES, **options)
    mine, theirs = data(), data()
    for call in range(3):
        if call == 1:
            mine, theirs = data(seed=4), data(seed=4)
        model.zero_grad()
        other.zero_grad()
        versions = [one._version for one in mine]
        loss = step(*mine)
        loss.backward()
        assert torch.equal(loss, accumulated(other, *theirs))
        left_alike(mine, theirs)
        assert mine[1]._version > versions[1]
        for name, gradient in own_gradients(model).items():
            assert torch.equal(gradient, other.get_parameter(name).grad)
    with torch.no_grad():
        mine, theirs = data(seed=5), data(seed=5)
        assert torch.equal(step(*mine), accumulated(other, *theirs, trains=False))
        left_alike(mine, theirs)


def left_alike(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other), (one, other)


@row(ranks=(1, 2))
def labels_that_are_masked_in_place():
    same(Masking())


@row(ranks=(1, 2))
def inputs_that_are_changed_in_place():
    same(Inputs())


@row(ranks=(1, 2))
def labels_that_a_traced_step_masks():
    same(Branching())


@row(ranks=(1, 2))
def labels_that_are_masked_where_the_backward_comes_later():
    """Its microbatches read the old rows until then."""
    same(Inputs(), loss="outside", recompute="always")


@row(ranks=(2,))
def labels_that_are_masked_in_two_replicas():
    model = Masking()
    mine, theirs = data(), data()
    step = pfeife.compile(model, microbatches=2, replicas=2, stages=1)
    step(*mine).backward()
    accumulated(model, *theirs, trains=False)
    left_alike(mine, theirs)


@row(ranks=(1, 2))
def labels_that_are_masked_under_torch_compile():
    model = Masking()
    other = copy.deepcopy(model)
    options = {"microbatches": 2, **STAGES}
    step = torch.compile(model, backend="pfeife", dynamic=True, options=options)
    for _ in range(2):
        mine, theirs = data(), data()
        loss = step(*mine)
        loss.backward()
        assert torch.equal(loss, accumulated(other, *theirs))
        left_alike(mine, theirs)


@row()
def one_tensor_under_two_names():
    net = Masking().layers

    def step(x, one, two):
        one[one == PAD] = -100
        return F.cross_entropy(net(x), two)

    x, labels = data()
    _, wanted = data()
    loss = pfeife.compile(step, microbatches=2, stages=2)(x, labels, labels)
    assert torch.equal(loss, accumulated(lambda x, one: step(x, one, one), x, wanted, trains=False))
    assert torch.equal(labels, wanted)


@row()
def columns_of_one_tensor_of_which_one_is_changed():
    """What lies between them is left alone; a step reads no memory under two names."""
    x, labels = data()
    model, both = Masking(), torch.stack([labels, labels], 1)
    pfeife.compile(model, microbatches=2, stages=2)(x, both[:, 0])
    assert torch.equal(both[:, 1], labels)
    assert not (both[:, 0] == PAD).any()


def _both(x, one, two):
    one[one == PAD] = -100
    return F.cross_entropy(x, one) + F.cross_entropy(x, two)


@row("the step changes its input one in place, which shares memory with two", ranks=(1, 2))
def an_argument_that_shares_memory_with_another_one():
    """Dynamo has the same graph for both calls."""
    layers = Masking().layers
    step = pfeife.compile(lambda x, one, two: _both(layers(x), one, two), microbatches=2, **STAGES)
    x, labels = data()
    step(x, labels, labels.clone())
    step(x, labels, labels.view(2, 4).flatten())


@row("the step changes its input labels in place, which is expanded")
def an_argument_that_is_expanded():
    model = Masking()
    step = pfeife.compile(model, microbatches=2, stages=2)
    x, labels = data()
    step(x, labels[:1].expand(8))


@row("the step changes its input table in place; only", ranks=(1, 2))
def a_table_that_goes_whole_to_every_microbatch():
    """Microbatches would see one another's changes."""
    layers = Masking().layers

    def step(x, table):
        table.mul_(0.5)
        return layers(x * table).square().mean()

    pfeife.compile(step, microbatches=2, in_dims={"table": None}, **STAGES)(
        data()[0], torch.ones(6)
    )


@row("the step changes its input x in place; only")
def an_input_that_gets_a_gradient_by_its_change():
    model, scale = Masking(), nn.Parameter(torch.ones(6))

    def step(x):
        x.mul_(scale)
        return model.layers(x).square().mean()

    pfeife.compile(step, microbatches=2, stages=2)(data()[0])


@row("the step changes its input x in place; only")
def an_input_with_a_gradient():
    model = Masking()

    def step(x):
        with torch.no_grad():
            x.clamp_(0, 1)
        return model.layers(x).square().mean()

    pfeife.compile(step, microbatches=2, stages=2)(data()[0].requires_grad_())


@row("the step could not be captured with its gradients: RuntimeError: one of the variables needed")
def an_input_that_is_changed_after_it_was_saved():
    """Eager refuses that, too."""
    model = Masking()

    def step(x):
        loss = model.layers(x).square().mean()
        x.add_(1)
        return loss

    pfeife.compile(step, microbatches=2, stages=2)(data()[0])


@row("the step changes the shape or strides of one of its arguments in place")
def an_argument_that_is_transposed_in_place():
    model = Masking()

    def step(x):
        return model.layers(x.t_()).square().mean()

    pfeife.compile(step, microbatches=2, stages=2, capture="trace")(torch.randn(12, 6))


def _sets_data(**options):
    model = Masking()

    def step(x):
        x.data = x.data * 2
        return model.layers(x).square().mean()

    pfeife.compile(step, microbatches=2, stages=2, **options)(data()[0])


@row("the step sets the data of an argument or of a part of a tensor (File")
def an_argument_whose_data_are_set():
    """What it is a part of stays as it is in eager."""
    _sets_data(capture="dynamo")


@row("the step could not be traced: the step sets the data of an argument or of a part of a tensor")
def an_argument_whose_data_a_traced_step_sets():
    _sets_data(capture="trace")


@row("the step could not be traced: the step sets the data of an argument or of a part of a tensor")
def a_part_of_a_weight_whose_data_are_set():
    model = Masking()

    def step(x):
        part = model.layers[0].weight[:2]
        part.data = part.data * 2
        return model.layers(x).square().mean()

    pfeife.compile(step, microbatches=2, stages=2, capture="trace")(data()[0])
