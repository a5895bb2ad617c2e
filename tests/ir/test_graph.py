"""The graph of a program at every level has one form, and flows as the bodies do."""

import networkx as nx
from small import clusters, net

import pfeife
from pfeife import sched
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
