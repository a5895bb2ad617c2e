"""Everything is cut where a step takes least by estimate."""

import copy

import pytest
import torch
import torch.nn.functional as F
from sent import DEAR_TO_COMPUTE, bytes_sent, collectives
from torch import nn

import pfeife
from pfeife import sched
from pfeife.cost import estimate, machine, memory_curves
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


def captured(blocks=2, width=1024, rows=2048, frozen=()):
    with torch.device("meta"):
        net = nn.Sequential(*(Block(width) for _ in range(blocks)))
        x = torch.ones(1, rows, width)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return pfeife.capture(lambda x: net(x).square().mean(), x)


def cut(program, members, placements="cut"):
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


def test_what_is_sent_once_a_step_costs_less_of_many_microbatches():
    """Parameters are gathered for all of them, rather than parts of activations for each; those
    that are not trained have no gradient that is sent."""
    frozen, whole = {"0.up.weight", "0.down.weight"}, []
    for microbatches, flat in (
        *((1, captured(1, 1024, 256)), (8, captured(1, 1024, 256))),
        (1, captured(1, 1024, 256, frozen)),
    ):
        prices = member_prices(H100, microbatches)
        local = pfeife.shard("auto", 2, unknown="gather", prices=prices, keepers={})(flat)
        ports = local.ports(pfeife.Role.PARAMETER)
        kept = [port for port in ports if port.split is None and port.keeper is not None]
        whole.append({port.fqn for port in kept})
    few, many, untrained = whole
    assert few < many and frozen <= many and frozen.isdisjoint(few) and frozen <= untrained


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


@pytest.mark.parametrize("attention", ["gather", "ring"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("members", [2, 3, 4])
def test_long_sequences_are_cut_through_attention(members, causal, attention):
    """Keys and values are gathered, and their gradients scattered; nothing else is large. In a ring
    both go around, in the backward keys and values once more."""
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 24).double(), torch.randn(1, 1, 240, 8).double()

    def step(x):
        q, k, v = layer(x).chunk(3, -1)
        return (x + F.scaled_dot_product_attention(q, k, v, is_causal=causal)).square().mean()

    flat = pfeife.capture(step, x)
    local = check_pass(
        pfeife.shard({}, members, prices=DEAR_TO_COMPUTE, attention=attention),
        *(flat, pfeife.state_of(flat, layer), [x]),
        rounding=None,
        within=1e-12,
    )
    told = collectives(local)
    if attention == "ring":
        assert told["shift"] == 6 * (members - 1) and not told["reduce_scatter"]
    else:
        assert told["reduce_scatter"] == 2 and told["all_gather"] >= 2


@pytest.mark.parametrize(
    ("fill", "dtype", "within"),
    [
        *((-torch.inf, torch.float64, 1e-13), (-torch.inf, torch.float32, 1e-6)),
        *((torch.finfo(torch.float64).min, torch.float64, 1e-13), (-1e9, torch.float32, 1e-6)),
        *((-1e17, torch.float64, 1e-13), (1e9, torch.float32, 1e-6)),
        *((-torch.inf, torch.float16, 0.02), (-65504.0, torch.float16, 0.02)),
    ],
)
@pytest.mark.parametrize("rows", ["some", "whole", "keys", "causal"])
def test_a_ring_with_a_mask(fill, dtype, within, rows):
    """Rows without a key in some block, or in any: what the mask adds there is all that is left of
    their scores, so that one device takes all keys alike, or none. In float32 numbers of 1e9 are
    64 apart, and so are scores. In float16 the least number is no farther than 65,504."""
    torch.manual_seed(0)
    mask = torch.zeros(1, 1, 1 if rows == "keys" else 48, 48, dtype=dtype)
    if rows == "causal":
        mask.masked_fill_(torch.ones(48, 48).triu(1).bool(), fill)
    elif rows == "keys":
        mask[..., :20] = fill
    else:
        mask[..., 20, 30:] = mask[..., 21, :30] = fill
        mask[..., : 13 if rows == "whole" else 0, :] = fill
    layer, x = nn.Linear(8, 24).to(dtype), torch.randn(1, 1, 48, 8).to(dtype)

    def step(x, mask):
        q, k, v = layer(x).chunk(3, -1)
        return (x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)).square().mean()

    flat = pfeife.capture(step, x, mask)
    state = pfeife.state_of(flat, layer)
    local = pfeife.shard({}, 4, prices=DEAR_TO_COMPUTE, attention="ring")(flat)
    assert collectives(local)["shift"] == 18
    whole, parts = (pfeife.evaluate(p, state, [(x, mask)]) for p in (flat, local))
    torch.testing.assert_close(parts.loss, whole.loss, rtol=within, atol=0)
    for name, gradient in whole.gradients.items():
        off = (parts.gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert off < within, (name, off)


@pytest.mark.parametrize("causal", [False, True])
def test_a_ring_in_bfloat16(causal):
    """As near to float64 as one device is in bfloat16, of which one bit is 2 ** -8."""
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 24).bfloat16(), torch.randn(1, 1, 128, 8).bfloat16()

    def step(layer, x):
        q, k, v = layer(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).float().square().mean()

    flat = pfeife.capture(lambda x: step(layer, x), x)
    local = pfeife.shard({}, 4, prices=DEAR_TO_COMPUTE, attention="ring")(flat)
    state = pfeife.state_of(flat, layer)
    exactly = copy.deepcopy(layer).double()
    step(exactly, x.double()).backward()
    expected = {name: p.grad for name, p in exactly.named_parameters()}
    for program in (flat, local):
        gradients = pfeife.evaluate(program, state, [x]).gradients
        for name, gradient in zip(expected, gradients.values(), strict=True):
            off = (gradient.double() - expected[name]).norm() / expected[name].norm()
            assert off < 2**-5, (name, off)


def test_a_ring_holds_no_keys_of_others():
    """The most that a member has at once: without a ring all keys and values are kept."""
    flat, peaks = captured(1, 64, 4096), {}
    for attention in ("gather", "ring"):
        local = pfeife.shard({}, 8, prices=DEAR_TO_COMPUTE, attention=attention)(flat)
        local = pfeife.annotate(estimate(fused := pfeife.fuse()(local), H100))(fused)
        plan = sched.plan(local, machine=H100, microbatches=1, stages=1, schedule="gpipe")
        ranks = pfeife.apply(plan)(local)
        (curve,) = memory_curves(ranks, sched.lower(plan.schedule, ranks))
        peaks[attention] = curve.peak
    assert peaks["ring"] < 0.7 * peaks["gather"]


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
