"""Batches of many sizes, on ranks too: one program for all, and the numbers of one device."""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rows import row
from torch import nn

import pfeife
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
