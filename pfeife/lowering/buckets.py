"""What travels together: gradients that are reduced, and what members of a group keep."""

import math
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from itertools import product

import attrs
import torch

from pfeife.data.machine import Machine
from pfeife.ir.nodes import returned
from pfeife.ir.parts import Port, Reduction, Role
from pfeife.ir.program import Program


@attrs.frozen(slots=False)
class Bucket:
    """Reductions over the same ranks, of gradients of one `dtype` with these `shapes`; they are
    `sparse`, or dense.

    Every member, a rank of a pipeline of a replica, has a part of each gradient. It sends to every
    other one the pieces that this one adds up; a sum that nobody owns then goes to all:

        parts of member 0   a a a | b b b        pieces of one owner, or equal ones
        parts of member 1   a a a | b b b        0 adds up those of a, 1 those of b
    """

    reductions: tuple[Reduction, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    sparse: bool = False

    @property
    def first(self) -> Reduction:
        """What all have in common is that of the first one."""
        return self.reductions[0]

    @property
    def members(self) -> int:
        """How many ranks, of all replicas, have parts of its gradients."""
        return self.first.replicas * self._each

    @property
    def _each(self) -> int:
        """Of a replica."""
        return len(self.first.ranks) * self.first.members

    @property
    def owned(self) -> bool:
        """Whether sums stay with their owners, or keepers."""
        return self.first.owner is not None or self.first.keeper is not None

    @cached_property
    def elements(self) -> tuple[int, ...]:
        """Of each gradient."""
        return tuple(map(math.prod, self.shapes))

    def share(self, replica: int, member: int) -> tuple[int, ...]:
        """The places of the gradients whose sums a member of a replica gets."""
        return tuple(
            place
            for place, reduction in enumerate(self.reductions)
            if reduction.owner in (None, replica) and reduction.keeper in (None, member)
        )

    def piece(self, replica: int, member: int) -> int:
        """How many elements a rank of that replica and member adds up."""
        if self.owned:
            # All of it on each rank: the owners' sums are needed whole, where their optimizers are.
            return sum(self.elements[place] for place in self.share(replica, member))
        # equal pieces, rounded up: the gradients lie in a row, and a piece may begin within one
        return -(-sum(self.elements) // self.members)

    @property
    def bytes(self) -> int:
        """Of all gradients."""
        return sum(self.elements) * self.dtype.itemsize

    @property
    def flat_bytes(self) -> int:
        """Of what a member sends, the piece that it adds up itself among it."""
        places = product(range(self.first.replicas), range(self.first.members))
        elements = len(self.first.ranks) * sum(self.piece(*place) for place in places)
        return elements * self.dtype.itemsize

    def scratch_bytes(self, replica: int, member: int) -> int:
        """Of the pieces that arrive at a rank of that replica and member, its own among them."""
        if self.sparse or self.members == 1:
            return 0
        return self.members * self.piece(replica, member) * self.dtype.itemsize

    def seconds(self, machine: Machine) -> float:
        """What it takes over a machine's links."""
        return reducing_seconds(self.members, self.bytes, self.owned, machine)


def reducing_seconds(members: int, size: int, owned: bool, machine: Machine) -> float:
    """What `size` bytes take over a machine's links: each of n members sends (n - 1) / n of its
    bytes in n - 1 messages, and once more what it has added up, unless the sums are `owned`
    (the ring all-reduce of Patarasuk and Yuan, JPDC 2009, sends as much)."""
    peers, rounds = members - 1, 1 if owned else 2
    round_seconds = peers * machine.link_latency + peers / members * size / machine.link_bandwidth
    return rounds * round_seconds


def owned_bytes(program: Program, rank: int) -> Counter[tuple[int, int]]:
    """The bytes of gradients on a rank of a pipeline that each replica alone gets, by replica and
    member: of a parameter that one of the members keeps, that one."""
    ports = {port.fqn: port for port in program.ports(Role.GRADIENT)}
    everyone = range(program.members)
    bytes_of = Counter(dict.fromkeys(product(range(program.replicas), everyone), 0))
    for reduction in program.reductions:
        if reduction.owner is not None and rank in reduction.ranks:
            port = ports[reduction.name]
            for member in everyone if port.keeper is None else (port.keeper,):
                bytes_of[reduction.owner, member] += port.given_bytes
    return bytes_of


def largest_share(program: Program, ranks: int) -> float:
    """How many times an even share of a rank's owned gradients the most is that one replica, or one
    of its members, has of them, on the worst of so many ranks: 1 where none are owned. A parameter
    is never cut, so that one which is larger than a share makes it more."""
    per_rank = [owned_bytes(program, rank) for rank in range(ranks)]
    owned = [shares for shares in per_rank if shares.total()]
    return max(
        (max(shares.values()) * len(shares) / shares.total() for shares in owned), default=1.0
    )


def buckets_of(program: Program) -> tuple[Bucket, ...]:
    """The buckets of a program's reductions, in their order."""
    results = returned(program.module)
    first: dict[str, Port] = {}
    for port in program.ports(Role.GRADIENT):
        # Parts of one gradient, by stages, have one shape and type: the first port stands for all.
        first.setdefault(port.fqn, port)
    together: dict[int | str, list[Reduction]] = {}
    for reduction in program.reductions:
        together.setdefault(
            reduction.name if reduction.bucket is None else reduction.bucket, []
        ).append(reduction)
    return tuple(
        _bucket(reductions, [first[reduction.name] for reduction in reductions], results)
        for reductions in together.values()
    )


def _bucket(reductions: Iterable[Reduction], ports: list[Port], results: dict) -> Bucket:
    sparse = results[ports[0].name].meta["val"].layout != torch.strided
    shapes = tuple(port.shape for port in ports)
    return Bucket(tuple(reductions), shapes, ports[0].dtype, sparse)


_FEW_BYTES = 1 << 20  # of what is told in one message, as latencies count more than these


def told_together(ports: Iterable[Port]) -> list[list[Port]]:
    """Parameters that members keep, or their gradients, in the order in which they tell one another
    their parts: a large one by itself, small ones with those that follow."""
    together: list[list[Port]] = []
    size = _FEW_BYTES
    for port in ports:
        if port.keeper is None:
            continue
        size += port.given_bytes
        if size > _FEW_BYTES:
            together.append([])
            size = port.given_bytes
        together[-1].append(port)
    return together


def most_told(ports: Iterable[Port]) -> int:
    """The bytes that a member is told of such ports by that keeper which tells it most."""
    told: Counter[int | None] = Counter()
    for port in ports:
        told[port.keeper] += port.part_bytes
    return max(told.values(), default=0)
