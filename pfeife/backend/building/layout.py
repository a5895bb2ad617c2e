"""Which ranks of the world are pipelines, by what a step takes over their links.

Two nodes of two ranks each, and two pipelines of two ranks:

    pipelines (0, 1) (2, 3)    activations stay in a node, gradients are reduced between nodes
    pipelines (0, 2) (1, 3)    activations go between nodes, gradients are reduced in a node
"""

import logging

import attrs

from pfeife.backend.building.planning import Planning
from pfeife.data import plain
from pfeife.data.machine import Mesh
from pfeife.data.network import Network
from pfeife.lowering.lower import lower
from pfeife.lowering.predict import predict
from pfeife.passes.apply import apply
from pfeife.runtime.distributed.world.world import World

log = logging.getLogger("pfeife")


def laid_out(planning: Planning, world: World, network: Network, mesh: Mesh) -> Mesh:
    """The mesh with which a step takes less by estimate, that of rank 0 on every rank (collective):
    a `mesh` whose pipelines are neighbours, or the one whose replicas are."""

    def decide() -> str:
        try:
            taken = {way: step_seconds(planning, network, way) for way in (mesh, across(mesh))}
        except ValueError as error:  # who plans next says so, or finds more
            log.debug("the ranks are laid out as they are numbered: %s", error)
            return plain.to_json(mesh)
        best = min(taken, key=taken.__getitem__)
        words = (f"{1e3 * took:.3g} ms with {way.pipelines}" for way, took in taken.items())
        log.info("pipelines are %s: a step takes %s", best.pipelines, ", ".join(words))
        return plain.to_json(best)

    return plain.from_json(Mesh, world.decided_by_rank_zero(decide))


def step_seconds(planning: Planning, network: Network, mesh: Mesh) -> float:
    """What a step takes on a mesh of the ranks of a network: computing, messages, reductions. 1F1B
    stands for what a search would find. Raises ValueError where there is no plan."""
    links = network.within(mesh)
    # A search takes seconds, and for this question only the links differ.
    quick = "1f1b" if planning.order == "search" else planning.order
    planning = attrs.evolve(planning, order=quick, ranks=mesh.ranks)
    plan = planning.plan(links, None, None)
    program = apply(plan, planning.replicas, {}, planning.passes)(planning.clusters)
    schedule, between = lower(plan.schedule, program), network.between(mesh)
    return predict(program, schedule, planning.machine, links, between).seconds


def across(mesh: Mesh) -> Mesh:
    """The mesh whose replicas are neighbours.

    >>> across(Mesh(ranks=2, replicas=2)).pipelines
    ((0, 2), (1, 3))
    """
    starts = range(mesh.replicas)
    order = tuple(rank for start in starts for rank in range(start, mesh.size, mesh.replicas))
    return attrs.evolve(mesh, order=order)
