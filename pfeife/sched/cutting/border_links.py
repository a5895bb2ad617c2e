"""What joins the ranks of stages: the link of each border between two of them."""

from collections.abc import Sequence
from itertools import pairwise

import attrs

from pfeife.data.link import Link, LinkKind
from pfeife.data.machine import Machine
from pfeife.data.network import Network
from pfeife.lowering.envelope import Travel

Joint = Machine | Link | LinkKind  # all tell the seconds of a message
Machines = Machine | tuple[Machine, ...]  # one for all ranks, or one a rank
_LARGE = 2**24  # bytes of a message by which machines' links are compared


NO_TRAVEL = Travel(0.0, 0.0, 0.0)


@attrs.frozen(eq=False)
class Border:
    """What joins the ranks of a stage and of the one before it: values go `ahead`, gradients
    `back`."""

    ahead: Joint
    back: Joint


def joint(machines: Machines, network: Network | None, source: int, destination: int) -> Joint:
    """What joins two ranks: their link of the network, or, without one, that of the slower
    machine. Raises ValueError for ranks that the network does not know."""
    if network:
        return network.link(source, destination)
    if isinstance(machines, Machine):
        return machines
    return max(
        (machines[source], machines[destination]),
        key=lambda machine: machine.transfer_seconds(_LARGE),
    )


def borders_of(
    stage_ranks: Sequence[int], machines: Machines, network: Network | None
) -> tuple[Border | None, ...]:
    """By stage what joins it with the one before it; None for the first one, and where both are on
    one rank."""
    by_link: dict[tuple[int, int], Border] = {}  # the same joints make the same border
    borders: list[Border | None] = [None]
    for before, here in pairwise(stage_ranks):
        if before == here:
            borders.append(None)
            continue
        ends = joint(machines, network, before, here), joint(machines, network, here, before)
        key = id(ends[0]), id(ends[1])
        borders.append(by_link.setdefault(key, Border(*ends)))
    return tuple(borders)
