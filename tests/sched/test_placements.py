"""Parameters are cut where a step takes least by estimate."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pfeife
from pfeife.cost import estimate, machine
from pfeife.cost.estimate import node_seconds
from pfeife.factors import Place
from pfeife.ir.members import MEANING
from pfeife.sched.placements import best_placements

H100 = machine("h100-sxm")


class Block(nn.Module):
    """Attention of one product, and two layers."""

    def __init__(self, width=1024):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).chunk(3, -1)
        heads = [each.unflatten(-1, (8, -1)).transpose(1, 2) for each in qkv]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def captured(blocks=2, width=1024, rows=2048):
    with torch.device("meta"):
        net = nn.Sequential(*(Block(width) for _ in range(blocks)))
        x = torch.ones(1, rows, width)
    return pfeife.capture(lambda x: net(x).square().mean(), x)


def seconds(program):
    return sum(node_seconds(node, H100) for node in program.module.graph.nodes)


def test_blocks_are_cut_as_megatron_does():
    """Columns and rows, the three blocks of a product apart, all blocks alike; it takes less than
    one device, and not more than where vectors stay whole."""
    flat = captured()
    places = best_placements(flat, 2, H100)
    for block in ("0", "1"):
        assert places[f"{block}.qkv.weight"] == Place(0, 3)
        assert places[f"{block}.up.weight"] == Place(0)
        assert {places[f"{block}.{name}.weight"] for name in ("out", "down")} == {Place(1)}
    local = pfeife.compose(pfeife.shard(places, 2), pfeife.merge_collectives())(flat)
    assert seconds(local) < 0.8 * seconds(flat)
    assert any(node.target in MEANING for node in local.module.graph.nodes)


def test_a_model_of_many_blocks_is_as_hard_as_one_of_few():
    """Blocks that look alike are one: their number does not change what is decided."""
    few, many = (best_placements(captured(n, 64, 16), 2, H100) for n in (3, 12))
    assert few == {name: place for name, place in many.items() if int(name.split(".")[0]) < 3}


@pytest.mark.parametrize("members", [2, 4])
def test_what_is_known_stays(members):
    """A parameter that is cut already is, one that is whole stays so."""
    flat = captured(1, 64, 16)
    known = {"0.norm.weight": True, "0.up.weight": False}
    places = best_placements(flat, members, H100, known)
    assert "0.norm.weight" in places and "0.up.weight" not in places
    assert "0.down.weight" in places


def test_the_numbers_are_those_of_one_device():
    """In float64, with all matrices cut."""
    torch.manual_seed(0)
    net, x = nn.Sequential(Block(16), Block(16)).double(), torch.randn(2, 5, 16).double()
    flat = pfeife.capture(lambda x: net(x).square().mean(), x)
    places = best_placements(flat, 2, H100)
    local = pfeife.compose(pfeife.shard(places, 2), pfeife.merge_collectives())(flat)
    state = pfeife.state_of(flat, net)
    whole, members = (pfeife.evaluate(program, state, [x]) for program in (flat, local))
    torch.testing.assert_close(members.loss, whole.loss, rtol=1e-13, atol=0)
    torch.testing.assert_close(members.gradients, whole.gradients, rtol=1e-9, atol=1e-15)
    assert estimate(pfeife.fuse()(local), H100).seconds
