"""Nodes in a few words: the same links as one by one, at any size."""

import json
import time
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfeife.cost import machine
from pfeife.data import plain
from pfeife.data.link import Link, LinkKind, link_kind
from pfeife.data.machine import Mesh
from pfeife.data.network import Network

KINDS = [LinkKind("slow", 1e8, 1e-4, 0.5), LinkKind("middle", 1e9, 1e-5), LinkKind("fast", 1e11)]
LARGE = 2**24


def one_by_one(network: Network, ranks: int) -> Network:
    """The same with a link for each pair."""

    def link(source: int, destination: int) -> Link:
        kind = network.link(source, destination)
        seconds = tuple(map(kind.transfer_seconds, (0, LARGE)))
        taken = tuple(map(kind.send_seconds, (0, LARGE)))
        return Link(source, destination, (0, LARGE), seconds, taken, taken, 0.0)

    return Network(tuple(link(*ends) for ends in permutations(range(ranks), 2)))


@st.composite
def nodes_and_meshes(draw: st.DrawFn) -> tuple[Network, Mesh]:
    count, each = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    inside = draw(st.lists(st.sampled_from(KINDS), min_size=count, max_size=count))
    network = Network.of(
        nodes=count, ranks_per_node=each, inside=inside, between=draw(st.sampled_from(KINDS))
    )
    size = count * each
    ranks = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    order = draw(st.one_of(st.just(()), st.permutations(range(size)).map(tuple)))
    return network, Mesh(ranks, size // ranks, order)


@given(nodes_and_meshes())
def test_nodes_are_the_links_one_by_one(case):
    network, mesh = case
    explicit = one_by_one(network, mesh.size)
    assert network.joins(mesh.size) and not network.joins(mesh.size + 1)
    here, core = network.within(mesh), machine("cpu-core")
    for ends in permutations(range(mesh.ranks), 2):
        found, wanted = here.link(*ends), explicit.within(mesh).link(*ends)
        for size in (0, 1000, LARGE):
            assert found.transfer_seconds(size) == pytest.approx(wanted.transfer_seconds(size))
            assert found.send_seconds(size) == pytest.approx(wanted.send_seconds(size))
    for mine, theirs in (
        (here, explicit.within(mesh)),
        (network.between(mesh), explicit.between(mesh)),
    ):
        for field in ("link_latency", "link_bandwidth", "overlap"):
            seen = [getattr(one.seen_by(core), field) for one in (mine, theirs)]
            assert seen[0] == pytest.approx(seen[1])
    assert plain.from_json(Network, plain.to_json(network)) == network


def test_a_thousand_ranks_take_no_time():
    """Neither to write down, nor to look at from 128 pipelines of eight."""
    start = time.process_time()
    network = Network.of(nodes=128, ranks_per_node=8, inside="nvlink4", between="ib-ndr")
    mesh = Mesh(ranks=8, replicas=128, order=tuple(sorted(range(1024), key=lambda r: r % 128)))
    assert network.joins(1024)
    for one in (network, network.within(mesh), network.between(mesh)):
        one.seen_by(machine("h100-sxm"))
    assert len(plain.to_json(network)) < 2**18
    assert time.process_time() - start < 5, "an endless loop would take minutes"


def test_a_file_of_measured_links_still_loads():
    link = Link(0, 1, (0, 8), (1e-6, 2e-6), (0.0, 0.0), (0.0, 0.0), 0.0)
    text = json.dumps({"links": [json.loads(plain.to_json(link))]})
    assert plain.from_json(Network, text) == Network((link,))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"inside": "nvlnk4"}, "link 'nvlnk4' is none of .* the nearest is 'nvlink4'"),
        ({"between": None}, "between= what joins the 2 nodes is missing"),
        ({"nodes": 0}, "nodes=0 must be a positive integer"),
        ({"ranks_per_node": True}, "ranks_per_node=True must be"),
        ({"inside": ["nvlink4"]}, "1 kinds of links inside of 2 nodes"),
    ],
)
def test_what_is_no_network(given, error):
    asked = {"nodes": 2, "ranks_per_node": 8, "inside": "nvlink4", "between": "ib-ndr"}
    with pytest.raises(ValueError, match=error):
        Network.of(**{**asked, **given})
    for ends in ((3, 3), (0, 16), (16, 0), (-1, 2)):
        with pytest.raises(ValueError, match="knows no link from rank"):
            Network.of(**asked).link(*ends)
    with pytest.raises(ValueError, match="the network has 16 ranks, and rank 16 is none"):
        Network.of(**asked).within(Mesh(8, 3))


def test_links_inside_of_groups():
    """The slowest one of neighbours, which share the work of a stage."""
    network = Network.of(nodes=2, ranks_per_node=4, inside="nvlink4", between="ib-ndr")
    h100, size = machine("h100-sxm"), 2**24
    for members, kind in ((2, "nvlink4"), (4, "nvlink4"), (8, "ib-ndr")):
        seen = network.for_members(h100, Mesh(ranks=8 // members, members=members))
        expected = link_kind(kind).transfer_seconds(size)
        assert seen.transfer_seconds(size) == pytest.approx(expected, rel=0.1)
    assert network.for_members(h100, Mesh(ranks=8)) == h100
