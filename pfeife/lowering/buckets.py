"""What travels together: gradients that are reduced, and what members of a group keep."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
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

    Sums of gradients that are `cut` over members of a group stand in the order of their keepers,
    which are sent them then, and put the parts together.
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
    def cut(self) -> bool:
        """Whether members of a group have parts of its gradients."""
        return self.first.split is not None

    @property
    def owned(self) -> bool:
        """Whether sums stay with their owners, or keepers."""
        added = self.first.keeper is not None and not self.cut
        return self.first.owner is not None or added

    @cached_property
    def elements(self) -> tuple[int, ...]:
        """Of each gradient."""
        return tuple(map(math.prod, self.shapes))

    def share(self, replica: int, member: int) -> tuple[int, ...]:
        """The places of the gradients whose sums a member of a replica gets."""
        return tuple(
            place
            for place, reduction in enumerate(self.reductions)
            if reduction.owner in (None, replica)
            and (self.cut or reduction.keeper in (None, member))
        )

    def kept(self, replica: int, member: int) -> tuple[int, ...]:
        """The places of those that a member puts together."""
        share = self.share(replica, member) if self.cut else ()
        return tuple(place for place in share if self.reductions[place].keeper == member)

    def kept_bytes(self, replica: int, member: int) -> int:
        """Of a member's parts of those."""
        kept = self.kept(replica, member)
        return sum(self.elements[place] for place in kept) * self.dtype.itemsize

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
        """Of the pieces that arrive at a rank of that replica and member, its own among them, and
        then of parts."""
        if self.sparse:
            return 0
        added = self.members * self.piece(replica, member) if self.members > 1 else 0
        split = self.first.split
        joined = split.members * self.kept_bytes(replica, member) if split is not None else 0
        return max(added * self.dtype.itemsize, joined)

    def seconds(self, slowest: Machine, machine: Machine) -> float:
        """What it takes over the `slowest` links between ranks, and over a machine's own what goes
        between members of one group."""
        one_group = self.first.replicas == len(self.first.ranks) == 1
        over = machine if one_group else slowest
        seconds = reducing_seconds(self.members, self.bytes, self.owned, over)
        if self.first.split is None:
            return seconds
        members = self.first.split.members
        places = product(range(self.first.replicas), range(members))
        most = max(self.kept_bytes(*place) for place in places)
        return seconds + (members - 1) * machine.transfer_seconds(most)


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
    return tuple(_bucket(reductions, first, results) for reductions in together.values())


def _bucket(reductions: Sequence[Reduction], first: Mapping[str, Port], results: dict) -> Bucket:
    if reductions[0].split is not None:
        reductions = sorted(reductions, key=lambda reduction: reduction.keeper or 0)
    ports = [first[reduction.name] for reduction in reductions]
    sparse = results[ports[0].name].meta["val"].layout != torch.strided
    shapes = tuple(port.shape for port in ports)
    return Bucket(tuple(reductions), shapes, ports[0].dtype, sparse)
