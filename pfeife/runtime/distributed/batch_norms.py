"""Statistics of batch norms that track the batch of all replicas: every rank has them."""

from collections import Counter

import torch

from pfeife.data.machine import Mesh
from pfeife.ir.evaluate import Result
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.ir.statistics import tracked_names
from pfeife.runtime.distributed.packing import pack, room, unpack
from pfeife.runtime.distributed.world import World
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
    message = pack(
        [microbatch[port.fqn] for microbatch in result.statistics for port in own_ports],
        world.device,
    )
    # A gather wants as many bytes of each rank as of the one that has most.
    missing = max(sizes.values()) * len(result.statistics) - len(message)
    gathered = world.gather(torch.cat([message, message.new_zeros(missing)]))
    statistics: list[dict[str, torch.Tensor]] = []
    for replica in range(mesh.replicas):
        of_replica = [
            {p.fqn: torch.empty_like(microbatch[p.fqn]) for p in own_ports}
            for microbatch in result.statistics
        ]
        values = [value for microbatch in of_replica for value in microbatch.values()]
        unpack(gathered[mesh.in_world(replica, rank)], values)
        statistics += of_replica
    return tuple(statistics)
