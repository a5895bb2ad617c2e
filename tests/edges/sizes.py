"""Batches of many sizes, on ranks too: one program for all, and the numbers of one device."""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rows import row
from torch import nn

import pfeife
from pfeife.ir.parts import captured_sizes
from pfeife.testing import own_gradients

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
STAGES = {} if RANKS > 1 else {"stages": 2}
SIZES = ((8, 6), (8, 7), (8, 19), (16, 12), (8, 6))  # rows and lengths


class Words(nn.Module):
    """Layers over sequences of any length, whose rows are padded."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), nn.Embedding(64, 8)
        layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(8, 20)

    def forward(self, words):
        hidden = self.words(words) + self.places(torch.arange(words.shape[1]))
        for layer in self.layers:
            hidden = hidden + layer(hidden) @ torch.ones(8, 8) / words.shape[1]
        return self.head(hidden)


def model():
    torch.manual_seed(0)
    return Words()


def batch(rows, length):
    torch.manual_seed(rows * length)
    x, y = (torch.randint(0, 20, (rows, length)) for _ in range(2))
    return x, y.masked_fill(torch.arange(length) >= length - 2, -100)


def loss_of(scores, y):
    return F.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=-100)


def plain(model, x, y, count):
    """What one device accumulates: the targets that count are as many in each row."""
    total = torch.zeros(())
    for part, targets in zip(x.chunk(count), y.chunk(count), strict=True):
        loss = loss_of(model(part), targets) / count
        loss.backward()
        total = total + loss.detach()
    return total


def trained(compiled, ours, whole=lambda *values: values, count=2, backend=None, sizes=SIZES):
    """Trains with batches of many sizes beside one device; how many programs there are."""
    other = copy.deepcopy(ours)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (ours, other)]
    for rows, length in sizes:
        x, y = batch(rows, length)
        loss = compiled(*whole(x, y))
        loss.backward()
        expected = plain(other, x, y, count)
        assert torch.equal(loss.detach(), expected), (rows, length)
        wanted = {name: one.grad for name, one in other.named_parameters()}
        for name, gradient in own_gradients(ours).items():
            assert torch.equal(gradient, wanted[name]), (name, rows, length)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return len((backend or compiled.backend).compiled)


@row(ranks=(1, 2, 3), whole=(1, 3))
def one_program_for_all():
    ours = model()
    compiled = pfeife.compile(lambda x, y: loss_of(ours(x), y), microbatches=2, **STAGES)
    assert trained(compiled, ours) <= 3


@row()
def what_is_set_at_a_later_size():
    """Dynamo's graph is looked at once more, with the same sizes left open."""
    ours, seen = model(), {}

    def step(x, y):
        if x.shape[1] > 10:
            seen["long"] = True
        return loss_of(ours(x), y)

    assert trained(pfeife.compile(step, microbatches=2, **STAGES), ours) <= 4  # 2 for each branch
    assert seen == {"long": True}


@row(ranks=(1, 2), whole=(1,))
def the_named_backend_has_one_for_all():
    """For all rows, too, though Dynamo's graph is of the whole batch."""
    ours, backend = model(), pfeife.backend(microbatches=2, **STAGES)
    step = torch.compile(lambda x, y: loss_of(ours(x), y), backend=backend, dynamic=True)
    traced_again = int(RANKS > 1)  # by Dynamo, with one more size that nothing reads
    assert trained(step, ours, backend=backend) <= 1 + traced_again


@row(ranks=(1, 2), whole=(2,))
def traced_as_it_runs():
    """What Dynamo does not take as one graph: the step looks for numbers that are none."""
    ours = model()

    def step(x, y):
        scores = ours(x)
        if scores.isnan().any():
            raise ValueError("the scores are none")
        return loss_of(scores, y)

    compiled = pfeife.compile(step, microbatches=2, **STAGES)
    assert trained(compiled, ours) <= 3
    assert compiled.backend.compiled[-1].captured.door == "trace"


@row()
def traced_with_padding():
    """Torch's kernel of it in C++ asks for sizes as numbers."""
    ours = model()
    ours.layers[1] = nn.Sequential(nn.ZeroPad2d((1, 0, 0, 0)), nn.Linear(9, 8))
    compiled = pfeife.compile(
        lambda x, y: loss_of(ours(x), y), microbatches=2, capture="trace", **STAGES
    )
    assert trained(compiled, ours) <= 3


@row(whole=(1,))
def traced_with_rows_for_a_number():
    """The lengths are open all the same."""
    ours = model()

    def step(x, y):
        scores = ours(x)
        return loss_of(torch.stack([scores[at] for at in range(int(x.shape[0]))]), y)

    compiled = pfeife.compile(step, microbatches=2, capture="trace", **STAGES)
    sizes = ((8, 6), (8, 7), (16, 12), (16, 9), (16, 10))
    assert trained(compiled, ours, sizes=sizes) <= 3


@row()
def traced_with_sizes_of_data():
    """What data and lengths decide together may be for one length: never an error."""
    ours = model()

    def step(x, y):
        scores = nn.functional.pad(ours(x), (0, 0, 0, 1))
        kept = scores[:, :-1].flatten(0, 1)[(x >= 0).flatten().nonzero()[:, 0]]
        return loss_of(kept.view(*x.shape, -1), y)

    trained(pfeife.compile(step, microbatches=2, capture="trace", **STAGES), ours)


@row(ranks=(1, 2), whole=(2,))
def traced_with_a_check_of_sizes_of_data():
    """What only a program of one size can have checked is a program for each size."""
    ours = model()

    def step(x, y):
        at = (x >= 0).flatten().nonzero()[:, 0]
        torch._check(at.shape[0] <= x.numel())
        return loss_of(ours(x).flatten(0, 1)[at].view(*x.shape, -1), y)

    trained(pfeife.compile(step, microbatches=2, capture="trace", **STAGES), ours)


@row(ranks=(2,))
def planned_anew_where_cuts_are_uneven():
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))

    def step(model, x):
        hidden = model(x)
        return (hidden @ hidden.transpose(1, 2) @ hidden).tanh().sum(1).square().mean()

    other = copy.deepcopy(ours)
    options = {"microbatches": 2, "machine": "cpu-core", "recompute": "auto"}
    compiled = pfeife.compile(lambda x: step(ours, x), dynamic=True, **options)
    wanted = dict(other.named_parameters())
    for size, planned in ((4, 4), (1200, 1200), (4, 1200)):
        torch.manual_seed(size)
        x = torch.randn(2, size, 256)
        compiled(x).backward()
        for part in x.chunk(2):
            (step(other, part) / 2).backward()
        for name, gradient in own_gradients(ours).items():
            assert torch.equal(gradient, wanted[name].grad), (name, size)
        for one in (ours, other):
            one.zero_grad()
        (built,) = compiled.backend.compiled
        assert planned in captured_sizes(built.program).values()


@row(ranks=(1, 2), whole=(1,))
def with_backwards_that_are_split():
    ours = model()
    compiled = pfeife.compile(
        lambda x, y: loss_of(ours(x), y), microbatches=4, schedule="zb-h1", **STAGES
    )
    assert trained(compiled, ours, count=4) <= 3


@row(ranks=(2,))
def what_rank_zero_alone_was_given():
    ours = model()
    compiled = pfeife.compile(
        lambda x, y: loss_of(ours(x), y), microbatches=2, batch="rank0", dynamic=True
    )

    def given(x, y):
        return (x, y) if RANK == 0 else (torch.zeros_like(x), torch.zeros_like(y))

    built = trained(compiled, ours, given)
    assert built <= 2, built


@row(ranks=(2,))
def replicas_with_batches_of_their_own():
    ours, other = model(), model()
    compiled = pfeife.compile(
        lambda x, y: loss_of(ours(x), y), microbatches=4, replicas=2, batch="replica", dynamic=True
    )
    for rows, length in SIZES:
        x, y = batch(rows, length)
        compiled(x.chunk(2)[RANK], y.chunk(2)[RANK]).backward()
        plain(other, x, y, 4)
        for one, two in zip(ours.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad)  # replicas add what they have added
            one.grad = two.grad = None
    assert len(compiled.backend.compiled) <= 2


@row(ranks=(1, 2), whole=(1,))
def with_the_loss_outside():
    ours, other = model(), model()
    compiled = pfeife.compile(ours, microbatches=2, loss="outside", dynamic=True, **STAGES)
    for rows, length in SIZES:
        x, y = batch(rows, length)
        loss_of(compiled(x), y).backward()
        loss_of(torch.cat([other(part) for part in x.chunk(2)]), y).backward()
        wanted = {name: one.grad for name, one in other.named_parameters()}
        for name, gradient in own_gradients(ours).items():
            assert torch.equal(gradient, wanted[name]), name
        ours.zero_grad()
        other.zero_grad()
    assert len(compiled.backend.compiled) <= 2


@row(ranks=(1, 2), whole=(1,))
def evaluated_in_between():
    """Outputs of many sizes come to all ranks."""
    ours, other = model(), model()
    compiled = pfeife.compile(ours, microbatches=2, dynamic=True, **STAGES)
    with torch.no_grad():
        for rows, length in SIZES:
            x, _ = batch(rows, length)
            assert torch.equal(compiled(x), torch.cat([other(part) for part in x.chunk(2)]))
    assert len(compiled.backend.compiled) <= 2


@row("the arguments of this call", ranks=(2,))
def lengths_that_ranks_do_not_share():
    """Each rank must be given the same shapes."""
    ours = model()
    compiled = pfeife.compile(lambda x, y: loss_of(ours(x), y), microbatches=2, dynamic=True)
    compiled(*batch(8, 6))
    dist.barrier()
    compiled(*batch(8, 7 + RANK))


@row(ranks=(2,))
def the_most_is_declared():
    """All ranks refuse what will not fit, before anything runs; a hint changes no numbers."""
    net, sizes = model(), {"x": {1: 60}, "y": {1: 60}}

    def step(x, y):
        return loss_of(net(x), y)

    try:
        pfeife.compile(step, microbatches=2, max_sizes=sizes, memory_limit=30_000)(*batch(8, 6))
    except ValueError as error:
        assert "limit" in str(error), error
    else:
        raise AssertionError("60 words do not fit")
    hinted = pfeife.compile(step, microbatches=2, sizes_hint=sizes, max_sizes=sizes)
    for rows, length in ((8, 6), (8, 19)):
        x, y = batch(rows, length)
        loss = hinted(x, y)
        assert torch.equal(loss.detach(), plain(model(), x, y, 2))
    (built,) = hinted.backend.compiled
    assert [p.shape for p in built.program.ports(pfeife.Role.BATCH)] == [(4, 60), (4, 60)]
