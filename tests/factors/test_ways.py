"""The ways in which members may compute a program."""

import torch
from torch import nn

import pfeife
from pfeife.factors import Place
from pfeife.factors.moves import SUM
from pfeife.factors.way import Way
from pfeife.factors.ways import Ways


def test_two_layers_as_megatron_cuts_them():
    """By columns, by rows, and what comes of a sum; and the batch, of which each takes a part."""
    net = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 4, bias=False))
    flat = pfeife.capture(lambda x: net(x).square().mean(), torch.ones(2, 4))
    parameters = {p.name: (None, Place(0), Place(1)) for p in flat.ports(pfeife.Role.PARAMETER)}
    ways = Ways(flat, 2, parameters)
    of = {node.name: ways.of[node] for node in ways.nodes}
    weight, first, relu, second = of["_0_weight"], of["mm"], of["relu"], of["mm_1"]
    assert [way.results[0] for way in weight] == [None, Place(0), Place(1)]
    assert Way((None, Place(1)), (Place(1),)) in first
    assert Way((Place(1), Place(0)), (SUM,)) in first
    assert Way((Place(1),), (Place(1),)) in relu
    assert Way((Place(1), Place(0)), (SUM,)) in second
    assert Way((Place(0),), (Place(0),)) in relu
    assert Way((Place(0), None), (Place(0),)) in first
    assert ways.of[next(n for n in ways.nodes if n.name == "x")] == [Way((), (None,), cut=False)]


def test_heads_of_one_product():
    """A product that is taken apart says so of its weight: each of three blocks may be cut."""
    net = nn.Linear(8, 24, bias=False)

    def step(x):
        q, k, v = net(x).unflatten(-1, (3, 2, 4)).unbind(-3)
        return (q * k + v).square().mean()

    flat = pfeife.capture(step, torch.ones(3, 8))
    (port,) = flat.ports(pfeife.Role.PARAMETER)
    ways = Ways(flat, 2, {port.name: (None, Place(0), Place(1))}, {port.name})
    weight = next(node for node in ways.nodes if node.name == port.name)
    assert Way((), (Place(0, 3),)) in ways.of[weight]
