"""Which ranks are pipelines: on two nodes each way is the better one once."""

import pytest
import torch
from nodes import two_nodes
from torch import nn

import pfeife
from pfeife.backend.building.layout import across, step_seconds
from pfeife.backend.building.planning import Planning
from pfeife.backend.settings.options import Options
from pfeife.cost import estimate, machine
from pfeife.data.machine import Mesh

NEIGHBOURS = Mesh(2, 2)


@pytest.mark.parametrize(
    ("width", "rows", "better"), [(8, 512, NEIGHBOURS), (256, 2, across(NEIGHBOURS))]
)
def test_the_network_decides(width, rows, better):
    """Many rows make large messages, wide layers large gradients. What takes longer goes over the
    links within a node."""
    net = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
    flat = pfeife.capture(lambda x: net(x).square().mean(), torch.ones(rows, width))
    core = machine("cpu-core")
    clusters = pfeife.fuse()(flat)
    clusters = pfeife.annotate(estimate(clusters, core))(clusters)
    options = Options(microbatches=8, replicas=2)
    planning = Planning(options, clusters, "1f1b", core, {}, options.replicated({}))
    found = {
        mesh: step_seconds(planning, two_nodes(), mesh) for mesh in (NEIGHBOURS, across(NEIGHBOURS))
    }
    assert min(found, key=found.__getitem__) == better
    assert max(found.values()) > 2 * min(found.values()), found


def test_links_of_a_mesh():
    """Those of pipelines and those of replicas are fast or slow, as the nodes are."""
    network = two_nodes()
    for mesh, inside, between in ((NEIGHBOURS, 1e-3, 1.0), (across(NEIGHBOURS), 1.0, 1e-3)):
        (link, _) = network.within(mesh).links
        assert link.transfer_seconds(2**20) == pytest.approx(inside, rel=0.1)
        for other in network.between(mesh).links:
            assert other.transfer_seconds(2**20) == pytest.approx(between, rel=0.1)
    assert network.joins(4) and not network.joins(5)
