"""Everything is cut where a step takes least by estimate."""

import pytest
import torch
import torch.nn.functional as F
from sent import DEAR_TO_COMPUTE, bytes_sent, collectives
from torch import nn

import pfeife
from pfeife.cost import estimate, machine
from pfeife.cost.estimate import member_prices, node_seconds
from pfeife.factors import Place
from pfeife.testing import check_pass

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


def cut(program, members, placements="auto"):
    prices = member_prices(H100)
    return pfeife.shard(placements, members, unknown="gather", prices=prices)(program)


def places_of(program):
    """How parameters are cut, by name."""
    ports = program.ports(pfeife.Role.PARAMETER)
    return {port.fqn: Place(port.split.dim, port.split.before) for port in ports if port.split}


def seconds(program):
    return sum(node_seconds(node, H100) for node in program.module.graph.nodes)


def test_blocks_are_cut_as_megatron_does():
    """Columns and rows, the three blocks of a product apart; rows are cut between them (Korthikanti
    et al. 2022, section 4.2.2): what is sent takes no longer, and norms are divided as well. So it
    takes less than where blocks are cut alike and rows are not."""
    flat = captured()
    local = cut(flat, 2)
    places = places_of(local)
    for block in ("0", "1"):
        assert places[f"{block}.qkv.weight"] == Place(0, 3)
        assert places[f"{block}.up.weight"] == Place(0)
        assert {places[f"{block}.{name}.weight"] for name in ("out", "down")} == {Place(1)}
    assert {"reduce_scatter", "all_gather"} <= collectives(local).keys()
    assert seconds(local) < 0.7 * seconds(flat)


def test_the_batch_is_cut_where_it_is_large():
    """Many rows of small layers: these are gathered, and their gradients scattered."""
    net, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.ones(4096, 8)
    flat = pfeife.capture(lambda x: net(x).square().mean(), x)
    local = pfeife.shard({"*.weight": 0}, 2)(flat)
    assert {"all_gather", "reduce_scatter"} <= collectives(local).keys()
    assert bytes_sent(local) < 1000


def test_a_model_of_many_blocks_is_as_hard_as_one_of_few():
    """Blocks that look alike are one: their number does not change what is decided."""
    few, many = (places_of(cut(captured(n, 64, 16), 2)) for n in (3, 12))
    assert few == {name: place for name, place in many.items() if int(name.split(".")[0]) < 3}


@pytest.mark.parametrize("members", [2, 4])
def test_what_is_known_stays(members):
    """A parameter that shall be cut is, one that shall be whole is not."""
    flat = captured(1, 64, 16)
    known = {"*": "auto", "0.norm.weight": "cut", "0.up.weight": None, "0.down.weight": "cut"}
    places = places_of(cut(flat, members, known))
    assert {"0.norm.weight", "0.down.weight"} <= places.keys() and "0.up.weight" not in places


@pytest.mark.parametrize("shape", [(2, 5, 16), (4, 64, 16), (1, 2, 16)])
@pytest.mark.parametrize("members", [2, 4])
def test_the_numbers_are_those_of_one_device(shape, members):
    """In float64, with all matrices cut, whatever else is."""
    torch.manual_seed(0)
    net, x = nn.Sequential(Block(16), Block(16)).double(), torch.randn(shape).double()
    flat = pfeife.capture(lambda x: net(x).square().mean(), x)
    local = cut(flat, members)
    state = pfeife.state_of(flat, net)
    whole, parts = (pfeife.evaluate(program, state, [x]) for program in (flat, local))
    torch.testing.assert_close(parts.loss, whole.loss, rtol=1e-13, atol=0)
    torch.testing.assert_close(parts.gradients, whole.gradients, rtol=1e-9, atol=1e-15)
    assert estimate(pfeife.fuse()(local), H100).seconds


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("members", [2, 3, 4])
def test_long_sequences_are_cut_through_attention(members, causal):
    """Keys and values are gathered, and their gradients scattered; nothing else is large."""
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 24).double(), torch.randn(1, 1, 240, 8).double()

    def step(x):
        q, k, v = layer(x).chunk(3, -1)
        return (x + F.scaled_dot_product_attention(q, k, v, is_causal=causal)).square().mean()

    flat = pfeife.capture(step, x)
    local = check_pass(
        pfeife.shard({}, members, prices=DEAR_TO_COMPUTE),
        *(flat, pfeife.state_of(flat, layer), [x]),
        rounding=None,
        within=1e-12,
    )
    told = collectives(local)
    assert told["reduce_scatter"] == 2 and told["all_gather"] >= 2


def test_what_is_after_a_member_counts_for_nothing():
    """Also where it is no number, as on one device: a member computes blocks that it then leaves
    out."""
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 24).double(), torch.randn(1, 1, 64, 8).double()
    x[..., 48:, :] = 1e300  # of which scores are infinite

    def step(x):
        q, k, v = layer(x).chunk(3, -1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (x + attended)[..., :32, :].square().mean()

    flat = pfeife.capture(step, x)
    state = pfeife.state_of(flat, layer)
    local = pfeife.shard({}, 2, prices=DEAR_TO_COMPUTE)(flat)
    whole, parts = (pfeife.evaluate(program, state, [x]) for program in (flat, local))
    assert whole.loss.isfinite()
    torch.testing.assert_close(parts.loss, whole.loss, rtol=1e-12, atol=0)
