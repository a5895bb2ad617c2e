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
    program: Program, mine: Result, world: World, mesh: Mesh
) -> tuple[dict[str, torch.Tensor], ...]:
    """What this rank's batch norms have found, in the microbatches of all replicas (collective if
    there are several)."""
    if mesh.replicas == 1 or not program.tracked:
        return mine.statistics
    rank, once = mesh.place(world.rank)[1], tracked_names(program)
    ports = [port for port in program.ports(Role.BUFFER_UPDATE) if port.fqn in once]
    sizes = Counter[int]()
    for port in ports:
        sizes[owner(program, port)] += room([port.bytes])
    own = [port for port in ports if owner(program, port) == rank]
    given = pack([one[port.fqn] for one in mine.statistics for port in own], world.device)
    missing = max(sizes.values()) * len(mine.statistics) - len(given)
    gathered = world.gather(torch.cat([given, given.new_zeros(missing)]))
    found: list[dict[str, torch.Tensor]] = []
    for replica in range(mesh.replicas):
        theirs = [{p.fqn: torch.empty_like(one[p.fqn]) for p in own} for one in mine.statistics]
        values = [value for one in theirs for value in one.values()]
        unpack(gathered[mesh.in_world(replica, rank)], values)
        found += theirs
    return tuple(found)
