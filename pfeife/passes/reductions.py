"""What becomes of gradients of which several ranks have parts: over which they are added up, and
which travel together."""

from collections.abc import Iterable, Iterator, Sequence

import attrs
import torch

from pfeife.ir.nodes import returned
from pfeife.ir.parts import Call, Kind, Reduction, Role
from pfeife.ir.program import Program


def reduction_of(
    program: Program, name: str, calls: set[Call], others: Iterable[int] = ()
) -> Reduction:
    """The reduction of one gradient over all ranks whose calls use the parameter, and `others`; and
    over their members, where these have addends of it, or parts that one of them keeps."""
    ranks = tuple(sorted({*others, *(call.rank for call in calls if call.rank is not None)}))
    # Stages that only read the parameter in a forward add nothing: the reduction need not wait.
    late = tuple(sorted({call.unit for call in calls if call.kind != Kind.FORWARD}))
    ports = [port for port in program.ports(Role.GRADIENT) if port.fqn == name]
    keeper, split = ports[0].keeper, ports[0].split
    if not any(port.partial for port in ports):
        if keeper is None or split is None:
            return Reduction(name, ranks, late, program.replicas)
        return Reduction(name, ranks, late, program.replicas, keeper=keeper, split=split)
    # Keepers of all replicas would be sent whole sums: more than all are of equal pieces.
    keeper = keeper if program.replicas == 1 else None
    return Reduction(name, ranks, late, program.replicas, members=program.members, keeper=keeper)


class Sizes:
    """What gradients are, by their parameters' names."""

    def __init__(self, program: Program):
        results = returned(program.module)
        ports = program.ports(Role.GRADIENT)
        self.bytes = {port.fqn: port.bytes for port in ports}
        self.given = {port.fqn: port.given_bytes for port in ports}
        self.keepers = {port.fqn: port.keeper for port in ports}
        self.kinds = {p.fqn: (p.dtype, results[p.name].meta["val"].layout) for p in ports}

    def is_sparse(self, name: str) -> bool:
        """Whether a gradient is a table of some rows."""
        return self.kinds[name][1] != torch.strided


def in_buckets(
    reductions: Sequence[Reduction], sizes: Sizes, bucket_bytes: int
) -> Iterator[Reduction]:
    """Each with the number of its bucket: those that are reduced at one time, over the same ranks,
    in one dtype."""
    open_: dict[tuple, tuple[int, int]] = {}  # number and bytes
    count = 0
    for reduction in reductions:
        # By what must be alike in one buffer: when it is due, who has parts, who gets the sum, the
        # type.
        kind, size = sizes.kinds[reduction.name], sizes.bytes[reduction.name]
        sharing = reduction.owner is None, reduction.keeper is None, reduction.split is None
        who = reduction.ranks, reduction.members, *sharing
        key = (reduction.stages[0], *who, kind)
        number, filled = open_.get(key, (-1, 0))
        # nobody knows beforehand how many elements of a sparse one travel, so it shares no buffer
        if number < 0 or filled + size > bucket_bytes or sizes.is_sparse(reduction.name):
            number, filled, count = count, 0, count + 1
        open_[key] = number, filled + size
        yield attrs.evolve(reduction, bucket=number)
