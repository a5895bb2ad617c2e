"""Statistics of batch norms that track the batch of all replicas: every rank has them."""

from collections import Counter

import torch

from pfeife.data.machine import Mesh
from pfeife.ir.combine import tracked_names
from pfeife.ir.evaluate import Result
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.runtime.distributed.control.packing import pack, room, views
from pfeife.runtime.distributed.world.world import World
from pfeife.runtime.results import owner


def statistics_of_all(
    program: Program, result: Result, world: World, mesh: Mesh
) -> tuple[dict[str, torch.Tensor], ...]:
    """What this rank's batch norms have found, in the microbatches of all replicas (collective if
    there are several)."""
    if mesh.replicas == 1 or not program.tracked:
        return result.statistics
    rank, once = mesh.place(world.rank)[1], tracked_names(program)
    ports = [port for port in program.ports(Role.BUFFER_UPDATE) if port.fqn in once]
    sizes = Counter[int]()
    for port in ports:
        sizes[owner(program, port)] += room([port.bytes])
    own_ports = [port for port in ports if owner(program, port) == rank]
    own = [microbatch[port.fqn] for microbatch in result.statistics for port in own_ports]
    message = pack(own, world.device)
    # A gather wants as many bytes of each rank as of the one that has most.
    missing = max(sizes.values()) * len(result.statistics) - len(message)
    gathered = world.gather(torch.cat([message, message.new_zeros(missing)]))
    statistics: list[dict[str, torch.Tensor]] = []
    for replica in range(mesh.replicas):
        values = views(gathered[mesh.in_world(replica, rank)], own)
        statistics += [{p.fqn: next(values) for p in own_ports} for _ in result.statistics]
    return tuple(statistics)
