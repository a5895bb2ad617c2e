"""Statistics of batch norms that track the batch of all replicas: every rank has them."""

from collections import Counter

import torch

from pfeife.data.machine import Mesh
from pfeife.ir.evaluate import Result
from pfeife.ir.program import Program, Role
from pfeife.ir.statistics import tracked_names
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
        sizes[owner(program, port)] += port.bytes
    own = [port for port in ports if owner(program, port) == rank]
    given = [_bytes(one[port.fqn]) for one in mine.statistics for port in own]
    missing = max(sizes.values()) * len(mine.statistics) - sum(map(len, given))
    padding = torch.zeros(missing, dtype=torch.uint8, device=world.device)
    gathered = world.gather(torch.cat([*given, padding]))
    found: list[dict[str, torch.Tensor]] = []
    for replica in range(mesh.replicas):
        theirs, at = gathered[mesh.in_world(replica, rank)], 0
        for _ in mine.statistics:
            found.append({})
            for port in own:
                value = theirs[at : at + port.bytes].clone().view(port.dtype)
                found[-1][port.fqn] = value.reshape(port.shape)
                at += port.bytes
    return tuple(found)


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)
