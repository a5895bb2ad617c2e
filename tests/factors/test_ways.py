"""The ways in which members may compute a program."""

import torch
from torch import nn

import pfeife
from pfeife.factors import Place
from pfeife.factors.ways import SUM, Way, Ways


def test_two_layers_as_megatron_cuts_them():
    """By columns, by rows, and what comes of a sum; a batch is in no way cut."""
    net = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 4, bias=False))
    flat = pfeife.capture(lambda x: net(x).square().mean(), torch.ones(3, 4))
    ways = Ways(flat, 2)
    of = {node.name: ways.of[node] for node in ways.nodes}
    weight, first, relu, second = of["_0_weight"], of["mm"], of["relu"], of["mm_1"]
    assert [way.results[0] for way in weight] == [None, Place(0), Place(1)]
    assert Way((None, Place(1)), (Place(1),)) in first
    assert Way((Place(1), Place(0)), (SUM,)) in first
    assert Way((Place(1),), (Place(1),)) in relu
    assert Way((Place(1), Place(0)), (SUM,)) in second
    assert all(place != Place(0) for way in relu for place in way.results)


def test_heads_of_one_product():
    """A product that is taken apart says so of its weight: each of three blocks may be cut."""
    net = nn.Linear(8, 24, bias=False)

    def step(x):
        q, k, v = net(x).unflatten(-1, (3, 2, 4)).unbind(-3)
        return (q * k + v).square().mean()

    flat = pfeife.capture(step, torch.ones(3, 8))
    ways = Ways(flat, 2)
    weight = next(node for node in ways.nodes if node.name in ways.parameters)
    assert Way((), (Place(0, 3),)) in ways.of[weight]
