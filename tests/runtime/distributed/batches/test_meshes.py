"""The option `mesh`."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import pfeife
from pfeife.backend.settings.options import options_from
from pfeife.data import plain
from pfeife.data.link import Link
from pfeife.data.machine import Mesh
from pfeife.data.network import Network
from pfeife.runtime.distributed.batches.meshes import mesh_of


@pytest.fixture
def world():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("given", "pipelines"),
    [
        ("4", [[0, 1, 2, 3]]),
        ("-2,4", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (" 4, -2", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("2,-2,2", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("-3", [[0], [1], [2]]),
        (Mesh(2, 2, (3, 1, 0, 2)), [[3, 1], [0, 2]]),
        (Mesh(2, 2), [[0, 1], [2, 3]]),
    ],
)
def test_which_ranks_are_a_pipeline(given, pipelines):
    mesh = mesh_of(given)
    places = [(r, i) for r in range(mesh.replicas) for i in range(mesh.ranks)]
    found = [[mesh.in_world(r, i) for i in range(mesh.ranks)] for r in range(mesh.replicas)]
    assert found == pipelines
    assert [mesh.place(mesh.in_world(*place)) for place in places] == places
    assert plain.from_json(Mesh, plain.to_json(mesh)) == mesh


def test_a_device_mesh(world):
    for names, order in ((("dp", "pp"), "-2,4"), (("pp", "dp"), "2,-4")):
        shape = (2, 4)
        given = DeviceMesh("cpu", torch.arange(8).view(shape), mesh_dim_names=names)
        assert mesh_of(given) == mesh_of(order)
    flat = DeviceMesh("cpu", torch.arange(8), mesh_dim_names=("pipeline",))
    assert mesh_of(flat) == mesh_of("8")
    for names in (("dp", "etp"), ("tp", "ep")):
        with pytest.raises(ValueError, match=r"the dimensions \['\w+', '\w+'\], of which one must"):
            mesh_of(DeviceMesh("cpu", torch.arange(8).view(2, 4), mesh_dim_names=names))


def test_a_device_mesh_with_members(world):
    """Members of a group are beside one another, whatever the order of the dimensions."""
    eight = torch.arange(8)
    for name in ("tp", "ep", "cp"):
        groups = DeviceMesh("cpu", eight.view(2, 4), mesh_dim_names=("dp", name))
        assert mesh_of(groups) == Mesh(1, 2, tuple(range(8)), members=4)
    across = DeviceMesh("cpu", eight.view(2, 2, 2), mesh_dim_names=("tp", "dp", "pp"))
    assert mesh_of(across) == Mesh(2, 2, (0, 4, 1, 5, 2, 6, 3, 7), members=2)


@pytest.mark.parametrize("wrong", ["", "2,-0", "-2,-4", "0,2", "2x4", 4, "2,,4"])
def test_what_is_no_mesh(wrong):
    with pytest.raises(ValueError, match="option mesh="):
        mesh_of(wrong)


def test_ranks_that_are_missing():
    with pytest.raises(ValueError, match="does not have each of the 4 ranks"):
        Mesh(2, 2, (0, 1, 2, 2))


def test_it_counts_the_replicas():
    assert options_from({"microbatches": 4, "mesh": "2,-2"}).replicas == 2
    with pytest.raises(ValueError, match="options replicas=4 and mesh='2,-2', which has 2"):
        options_from({"microbatches": 4, "mesh": "2,-2", "replicas": 4})
    with pytest.raises(ValueError, match="every replica takes the same number"):
        pfeife.backend(microbatches=3, mesh="2,-2")


def test_links_of_a_pipeline():
    """The slowest of ranks 0 and 2, and 1 and 3."""
    links = [
        Link(a, b, (0, 1), (1.0, 10.0 * a + b + 2), (0.0, 0.0), (0.0, 0.0), 0.0)
        for a in range(4)
        for b in range(4)
        if a != b
    ]
    found = Network(tuple(links)).within(mesh_of("2,-2"))
    assert {(one.source, one.destination): one.seconds for one in found.links} == {
        (0, 1): (1.0, 15.0),
        (1, 0): (1.0, 33.0),
    }
