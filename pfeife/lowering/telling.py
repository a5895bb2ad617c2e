"""Parameters that one member of a group keeps, and tells the others in each step."""

from collections.abc import Iterable, Iterator, Sequence

import attrs

from pfeife.ir.messages import holders
from pfeife.ir.parts import Port, Role
from pfeife.ir.program import Program

_FEW_BYTES = 1 << 20  # of what is told in one message, as latencies count more than these
_ALIGNED = 64  # bytes: where torch's own tensors begin, so that kernels add in the same order


def aligned(size: int) -> int:
    """So many bytes, and those up to where another tensor may begin."""
    return -(-size // _ALIGNED) * _ALIGNED


@attrs.frozen
class Kept:
    """Parameters that members keep, of a rank, each one of them, and tell the others for as long as
    stages compute with them: named after the first `stage` there that reads them. `users` are the
    stages of that rank, and those after which reductions of their gradients are named."""

    stage: int
    rank: int
    ports: tuple[Port, ...]
    users: frozenset[int]


def kept_by_stage(program: Program) -> tuple[Kept, ...]:
    """What members of a program's ranks keep for one another."""
    kept = [port for port in program.ports(Role.PARAMETER) if port.keeper is not None]
    calls_of = holders(program, Role.PARAMETER) if kept else {}
    reduced = {reduction.name: reduction.stages[0] for reduction in program.reductions}
    ports: dict[tuple[int, int], list[Port]] = {}
    users: dict[tuple[int, int], set[int]] = {}
    for port in kept:
        units: dict[int, set[int]] = {}  # by ranks
        for call in calls_of[port.fqn]:
            if call.rank is not None:
                units.setdefault(call.rank, set()).add(call.unit)
        for rank, stages in units.items():
            named = min(stages), rank
            ports.setdefault(named, []).append(port)
            users.setdefault(named, set()).update({reduced.get(port.fqn, named[0]), *stages})
    return tuple(
        Kept(*named, tuple(ports[named]), frozenset(users[named])) for named in sorted(ports)
    )


@attrs.frozen
class Telling:
    """What is told at one time: members' parts of what is `cut`, or all of what is not; of each
    keeper the ports that it keeps."""

    kept: tuple[tuple[Port, ...], ...]
    cut: bool

    def bytes(self, keeper: int) -> int:
        """Of what a keeper tells each of the others."""
        return sum(aligned(port.part_bytes) for port in self.kept[keeper])

    def packed_bytes(self, keeper: int) -> int:
        """Of what a keeper packs to send it."""
        return self.bytes(keeper) * (len(self.kept) if self.cut else 1)

    @property
    def most(self) -> int:
        """The bytes that a member is told by that keeper which tells it most."""
        return max(map(self.bytes, range(len(self.kept))))


def tellings(ports: Sequence[Port], members: int) -> Iterator[Telling]:
    """In which messages members tell one another parameters, in their order: a large one by itself,
    small ones with those that follow."""
    for together in _together(ports):
        for cut in (True, False):
            told = [port for port in together if (port.split is not None) == cut]
            if told:
                each = (tuple(p for p in told if p.keeper == member) for member in range(members))
                yield Telling(tuple(each), cut)


def _together(ports: Iterable[Port]) -> list[list[Port]]:
    together: list[list[Port]] = []
    size = 0
    for port in ports:
        size += port.given_bytes
        if not together or size > _FEW_BYTES:
            together.append([])
            size = port.given_bytes
        together[-1].append(port)
    return together
