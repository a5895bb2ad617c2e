"""The graph of a program at every level has one form, and flows as the bodies do."""

import copy
import pickle

import networkx as nx
import pytest
import torch
from small import clusters, net

import pfeife
from pfeife import sched
from pfeife.ir.digest import fingerprint
from pfeife.ir.flops import flops_of


def test_every_level():
    one = net()
    flat = pfeife.capture(one.step, one.batch(2))
    fused = clusters(one)
    plan = pfeife.Plan((0, 0, 1, 1), sched.families.one_f_one_b(2, 4))
    ranks = pfeife.apply(plan)(fused)
    for program in (flat, fused, ranks):
        graph = program.graph()
        assert nx.is_directed_acyclic_graph(graph)
        flops = sum(data["flops"] for _, data in graph.nodes(data=True))
        assert flops == sum(flops_of(program).values()) > 0
    sent = [edge for edge in ranks.graph().edges(data=True) if edge[2]["sent"]]
    crossing = {
        (ranks.graph().nodes[a]["rank"], ranks.graph().nodes[b]["rank"]) for a, b, _ in sent
    }
    assert crossing == {(0, 1), (1, 0)}
    assert fused.graph().edges["cluster_0_forward", "cluster_1_forward"]["bytes"] == 2 * 4 * 4


def test_a_program_is_copied_whole_and_not_pickled():
    """A pickle of a graph module is its code alone, without shapes and lines."""
    flat = pfeife.capture(lambda x: x.relu().sum(), torch.ones(2))
    for other in (copy.copy(flat), copy.deepcopy(flat)):
        assert fingerprint(other) == fingerprint(flat)
        assert [n.meta.keys() for n in other.module.graph.nodes] == [
            n.meta.keys() for n in flat.module.graph.nodes
        ]
    with pytest.raises(TypeError, match=r"is not pickled.*--save-program"):
        pickle.dumps(flat)
