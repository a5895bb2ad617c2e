"""`state_dict()` and `load_state_dict()` of an unchanged script, on ranks that share the training."""

import copy

import torch
import torch.distributed as dist
from rows import row
from torch import nn

import pfeife
from edges.state import PAIR, Tied, accumulated, layers, rows


def norms():
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(3))
    )


def grouped(model):
    """Two groups, of which each has parameters of both ranks, in another order than the model's."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": others[::-1], "weight_decay": 0.0}, {"params": weights, "lr": 0.02}]


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(grouped(model), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(grouped(model), lr=0.01, amsgrad=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
}


class Pair:
    """A model on the ranks and its twin on one device, with an optimizer each."""

    def __init__(self, make=norms, optimizer="momentum", **options):
        self.model = make()
        self.twin = copy.deepcopy(self.model)
        self.step = pfeife.compile(self.loss_of(self.model), **PAIR, **options)
        self.mine, self.theirs = (OPTIMIZERS[optimizer](m) for m in (self.model, self.twin))
        self.seed = 0

    @staticmethod
    def loss_of(model):
        return lambda x: model(x).square().mean()

    def train(self, steps=1):
        for _ in range(steps):
            x = rows(self.seed, 8)
            loss = self.step(x)
            loss.backward()
            assert torch.equal(loss, accumulated(self.loss_of(self.twin), x))
            for optimizer in (self.mine, self.theirs):
                optimizer.step()
                optimizer.zero_grad()
            self.seed += 1

    def check(self):
        alike(self.model.state_dict(), self.twin.state_dict())
        alike(self.mine.state_dict(), self.theirs.state_dict())


def alike(found, expected, at=""):
    """The same keys in the same order, the same types, shapes, dtypes and bits."""
    assert type(found) is type(expected), (at, found, expected)
    if isinstance(found, torch.Tensor):
        kinds = [
            (one.shape, one.dtype, one.stride(), one.requires_grad) for one in (found, expected)
        ]
        assert kinds[0] == kinds[1] and torch.equal(found, expected), (at, found, expected)
    elif isinstance(found, dict):
        assert list(found) == list(expected), (at, list(found), list(expected))
        for key in found:
            alike(found[key], expected[key], f"{at}.{key}")
    elif isinstance(found, list | tuple):
        assert len(found) == len(expected), at
        for index, pair in enumerate(zip(found, expected, strict=True)):
            alike(*pair, f"{at}.{index}")
    else:
        assert found == expected, at


@row(ranks=(2,))
def by_rank_zero_alone():
    """Between any two steps, several times."""
    for optimizer in OPTIMIZERS:
        pair = Pair(optimizer=optimizer)
        for _ in range(3):
            pair.train()
            if dist.get_rank() == 0:
                pair.check()
                pair.check()
