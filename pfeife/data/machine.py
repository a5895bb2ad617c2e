"""What there is to run on: machines, and how their ranks are pipelines and replicas."""

from collections.abc import Mapping
from reprlib import repr as short

import attrs
import torch

from pfeife.data import checks

_DTYPES = frozenset(
    str(value).removeprefix("torch.")
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
)


def _by_dtype(flops: float | Mapping[str, float]) -> dict[str, float]:
    rates = flops if isinstance(flops, Mapping) else {"float32": flops}
    return {dtype: float(value) for dtype, value in rates.items()}


def _rates(instance: object, attribute: attrs.Attribute, value: Mapping[str, float]) -> None:
    where = checks.named(instance, attribute)
    unknown = sorted(set(value) - _DTYPES)
    if unknown:
        raise ValueError(
            f"{where}: {short(unknown)} are no dtypes; write them as torch does: 'bfloat16'"
        )
    checks.each(checks.rate)(instance, attribute, value)


def _has_float32(instance: object, attribute: attrs.Attribute, value: Mapping[str, float]) -> None:
    if "float32" not in value:
        raise ValueError(
            f"{checks.named(instance, attribute)} must have 'float32', which dtypes without "
            f"a rate of their own run at; there are {sorted(value)}"
        )


def _fields(instance: object, attribute: attrs.Attribute, value: Mapping[str, str]) -> None:
    unknown = sorted(set(value) - set(Machine.__annotations__))
    if unknown:
        raise ValueError(
            f"{checks.named(instance, attribute)}: {short(unknown)} are no fields of a machine"
        )


@attrs.frozen
class Machine:
    """What one rank has: rates are sustained, not peak.

    `flops` in operations per second by dtype ("float32", "bfloat16"; a number alone is
    float32's), `memory_bandwidth` and `link_bandwidth` (one direction to one other rank) in bytes
    per second, `link_latency`, `launch_seconds` (of one operation) and `action_seconds` (that the
    runtime adds to every action of a schedule) in seconds, `memory` in bytes. `overlap` is the
    fraction of a transfer's time that is hidden from the ranks' computing: 1 where other hardware
    moves the bytes, 0 where a rank is busy while it sends and receives.

    For reports: `peak_flops` and `peak_memory_bandwidth` as the data sheet has them, and
    `sources`, which says for a field where its value comes from and what was assumed.
    `device_names` are the patterns (of fnmatch) of what torch.cuda.get_device_name calls it.
    """

    name: str
    flops: dict[str, float] = attrs.field(converter=_by_dtype, validator=[_rates, _has_float32])
    memory_bandwidth: float = attrs.field(validator=checks.rate)
    memory: int = attrs.field(validator=checks.positive)
    link_bandwidth: float = attrs.field(validator=checks.rate)
    link_latency: float = attrs.field(default=0.0, validator=checks.seconds)
    launch_seconds: float = attrs.field(default=0.0, validator=checks.seconds)
    action_seconds: float = attrs.field(default=0.0, validator=checks.seconds)
    overlap: float = attrs.field(default=1.0, validator=checks.fraction)
    peak_flops: dict[str, float] = attrs.field(factory=dict, converter=_by_dtype, validator=_rates)
    peak_memory_bandwidth: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(checks.rate)
    )
    device_names: tuple[str, ...] = ()
    sources: dict[str, str] = attrs.field(factory=dict, validator=_fields, repr=False)

    def flops_of(self, dtype: torch.dtype) -> float:
        """Operations per second on a dtype: its own rate, else float32's."""
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])

    def peak_of(self, dtype: torch.dtype) -> float:
        """Operations per second on a dtype as the data sheet has them: its own rate, else
        float32's; the sustained ones where there are none."""
        name = str(dtype).removeprefix("torch.")
        rates = self.flops | self.peak_flops
        return rates.get(name, rates["float32"])

    def transfer_seconds(self, size: int) -> float:
        """Seconds until a message of so many bytes has arrived."""
        return self.link_latency + size / self.link_bandwidth

    def send_seconds(self, size: int) -> float:
        """What a message takes of the time of either of its ranks."""
        return (1 - self.overlap) * self.transfer_seconds(size)

    receive_seconds = send_seconds


@attrs.frozen
class Mesh:
    """`replicas` pipelines of `ranks` ranks each, each of which may be a group of `members` that
    share its work.

    `order` has the ranks of the world, pipeline after pipeline, each from its first stages to its
    last, and members of a group beside one another; without it neighbours in a pipeline are
    neighbours in the world. Pipelines, and places in them, are those of one `member`.

        Mesh(ranks=2, replicas=2)                        pipelines 0 1 and 2 3
        Mesh(ranks=2, replicas=2, order=(0, 2, 1, 3))    pipelines 0 2 and 1 3
        Mesh(ranks=2, members=2)                         pipelines 0 2 and 1 3, groups 0 1 and 2 3
    """

    ranks: int = attrs.field(validator=checks.positive)
    replicas: int = attrs.field(default=1, validator=checks.positive)
    order: tuple[int, ...] = ()
    members: int = attrs.field(default=1, validator=checks.positive)
    member: int = 0

    def __attrs_post_init__(self) -> None:
        if self.order and sorted(self.order) != [*range(self.size)]:
            raise ValueError(
                f"Mesh: order={self.order} does not have each of the {self.size} ranks of "
                f"{self.replicas} pipelines of {self.ranks} ranks once"
            )
        if not 0 <= self.member < self.members:
            raise ValueError(f"Mesh: there is no member {self.member} of {self.members}")

    @property
    def size(self) -> int:
        """The ranks of the world."""
        return self.ranks * self.replicas * self.members

    @property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of the world in each pipeline."""
        ranks, replicas = range(self.ranks), range(self.replicas)
        return tuple(tuple(self.in_world(replica, rank) for rank in ranks) for replica in replicas)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of the world that share the work of one rank of a pipeline, for each of these,
        in the order of the members."""
        order = self.order or tuple(range(self.size))
        return tuple(order[at : at + self.members] for at in range(0, self.size, self.members))

    @property
    def each_member(self) -> "tuple[Mesh, ...]":
        """The same mesh as every member sees it."""
        return tuple(attrs.evolve(self, member=member) for member in range(self.members))

    def of_member(self, rank: int) -> "Mesh":
        """The same mesh as a rank of the world sees it."""
        return self.each_member[self._at(rank) % self.members]

    def in_world(self, replica: int, rank: int) -> int:
        """The rank of the world that is this rank of a pipeline."""
        at = (replica * self.ranks + rank) * self.members + self.member
        return self.order[at] if self.order else at

    def place(self, rank: int) -> tuple[int, int]:
        """The pipeline that a rank of the world is in, and which rank of it."""
        return divmod(self._at(rank) // self.members, self.ranks)

    def _at(self, rank: int) -> int:
        return self.order.index(rank) if self.order else rank
