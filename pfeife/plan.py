"""Decisions as plain data: costs, machine, actions, schedule, plan. All go to JSON and back."""

import csv
import io
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from itertools import pairwise
from reprlib import repr as short

import attrs
import torch

from pfeife import checks, plain
from pfeife.program import Kind

_DTYPES = frozenset(
    str(value).removeprefix("torch.")
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
)


def _by_dtype(given: float | Mapping[str, float]) -> dict[str, float]:
    rates = given if isinstance(given, Mapping) else {"float32": given}
    return {dtype: float(value) for dtype, value in rates.items()}


_EACH_SECONDS = checks.each(checks.seconds)


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

    def transfer_seconds(self, size: int) -> float:
        return self.link_latency + size / self.link_bandwidth


@attrs.frozen
class Link:
    """One direction between two ranks, for messages of `sizes[i]` bytes.

    `seconds[i]` until it has arrived at a rank that waits for it; `sending[i]` and
    `receiving[i]` are what it takes away from the computing of the two ranks (the cost model is
    LogGP's with all of it by size; Alexandrov et al., JPDC 1997). Straight lines between the
    sizes, the last one going on. `residual` is the largest relative error of the fit to
    `seconds`.
    """

    source: int = attrs.field(validator=checks.not_negative)
    destination: int = attrs.field(validator=checks.not_negative)
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    sending: tuple[float, ...]
    receiving: tuple[float, ...]
    residual: float

    def __attrs_post_init__(self) -> None:
        where = f"Link {self.source} -> {self.destination}"
        if self.source == self.destination:
            raise ValueError(f"{where}: a link is between two ranks")
        lengths = {len(self.sizes), len(self.seconds), len(self.sending), len(self.receiving)}
        if lengths != {len(self.sizes)} or len(self.sizes) < 2:
            raise ValueError(f"{where}: figures for {lengths} sizes")
        if self.sizes[0] != 0 or any(low >= high for low, high in pairwise(self.sizes)):
            raise ValueError(f"{where}: Link.sizes must ascend from 0, not {self.sizes}")
        for values in (self.seconds, self.sending, self.receiving):
            if not values[0] >= 0 or any(not low <= high for low, high in pairwise(values)):
                raise ValueError(f"{where}: seconds {values} are negative or fall")
        if not self.seconds[-1] > 0 or not self.residual >= 0:
            raise ValueError(f"{where}: no seconds, or a residual of {self.residual}")
        longest = max(self.seconds[-1], self.sending[-1], self.receiving[-1])
        if longest > checks.LONGEST:
            raise ValueError(f"{where}: a message takes {longest} seconds, over {checks.LONGEST:g}")

    def transfer_seconds(self, size: int) -> float:
        return self._at(self.seconds, size)

    def send_seconds(self, size: int) -> float:
        return self._at(self.sending, size)

    def receive_seconds(self, size: int) -> float:
        return self._at(self.receiving, size)

    def _at(self, seconds: tuple[float, ...], size: int) -> float:
        at = min(max(bisect_right(self.sizes, size), 1), len(self.sizes) - 1)
        low, high = self.sizes[at - 1], self.sizes[at]
        slope = (seconds[at] - seconds[at - 1]) / (high - low)
        return seconds[at - 1] + slope * (size - low)


@attrs.frozen
class Network:
    """The links between the ranks of a world, one for each direction of a pair."""

    links: tuple[Link, ...]

    def __attrs_post_init__(self) -> None:
        ends = Counter((link.source, link.destination) for link in self.links)
        for (source, destination), count in ends.items():
            if count > 1:
                raise ValueError(f"Network: {count} links from rank {source} to {destination}")

    def link(self, source: int, destination: int) -> Link:
        """Raises ValueError for a pair of ranks that was not measured."""
        for link in self.links:
            if (link.source, link.destination) == (source, destination):
                return link
        raise ValueError(f"the network knows no link from rank {source} to rank {destination}")

    def seen_by(self, machine: Machine) -> Machine:
        """The machine with the figures of the slowest link, for decisions before ranks are
        known."""
        if not self.links:
            return machine
        slowest = max(self.links, key=lambda link: link.seconds[-1])
        taken = max(slowest.sending[-1], slowest.receiving[-1]) / slowest.seconds[-1]
        rising = slowest.seconds[-1] - slowest.seconds[0]
        return attrs.evolve(
            machine,
            link_latency=slowest.seconds[0],
            link_bandwidth=slowest.sizes[-1] / max(rising, 1e-12),
            overlap=min(max(1 - taken, 0.0), 1.0),
        )


@attrs.frozen
class Costs:
    """Seconds of one microbatch in every call of a program, by the name of the call's node.

    `spread` is the measurements' interquartile range in seconds, empty for estimates;
    `accumulate` what it takes to add the gradients of a call to those of earlier microbatches.
    """

    source: str
    seconds: dict[str, float] = attrs.field(validator=_EACH_SECONDS)
    spread: dict[str, float] = attrs.field(factory=dict, validator=_EACH_SECONDS)
    accumulate: dict[str, float] = attrs.field(factory=dict, validator=_EACH_SECONDS)

    def __attrs_post_init__(self) -> None:
        unknown = sorted({*self.spread, *self.accumulate} - set(self.seconds))
        if unknown:
            raise ValueError(f"Costs: {short(unknown)} have a spread, but no seconds")


class Do(StrEnum):
    """What an action does, in the words of torch.distributed.pipelining's CSV."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_BACKWARD = "I"
    WEIGHT_BACKWARD = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"

    @property
    def kind(self) -> Kind | None:
        """The call that an action of computation runs; None for the others."""
        return _KINDS.get(self.value)


_KINDS = {kind.value: kind for kind in Kind}
# Which stage the other end of a transfer is, seen from this one, in a chain of stages.
_NEIGHBOUR = {Do.SEND_F: 1, Do.RECV_F: -1, Do.SEND_B: -1, Do.RECV_B: 1}


@attrs.frozen
class Action:
    """One thing that a rank does for one stage and one microbatch (None: once a step).

    A send's `stage` is the one that made the values and its `peer` the first stage of the other
    rank that reads them; a receive's are the other way round. In the text form the peer is
    left out where it is the neighbour, so that chains of stages read as torch writes them.
    A reduction's `stage` is the first stage that has a part in the gradients.
    Raises ValueError for a transfer without a peer, or another action with one.
    """

    stage: int = attrs.field(validator=checks.not_negative)
    do: Do
    microbatch: int | None = attrs.field(default=None, validator=checks.not_negative)
    peer: int | None = attrs.field(default=None, validator=checks.not_negative)

    def __attrs_post_init__(self) -> None:
        if (self.peer is None) == (self.do in _NEIGHBOUR):
            raise ValueError(
                f"{self.stage}{self.do} with the peer {self.peer}: a send or receive has a stage "
                "at the other end, nothing else has"
            )

    def runs(self, kind: Kind) -> bool:
        """Whether the action runs a call of this kind; a backward may be there in two parts."""
        own = self.do.kind
        return own == kind or (own == Kind.BACKWARD and kind != Kind.FORWARD)

    def __str__(self) -> str:
        neighbour = self.stage + _NEIGHBOUR.get(self.do, 0)
        peer = "" if self.peer in (None, neighbour) else f"@{self.peer}"
        return f"{self.stage}{self.do}{'' if self.microbatch is None else self.microbatch}{peer}"


_ACTION = re.compile(
    r"(\d{1,18})(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD|F|B|I|W)(\d{0,18})(?:@(\d{1,18}))?",
    re.ASCII,
)


def parse_action(text: str) -> Action:
    """Reads what `str(action)` wrote, which torch's own text is a part of."""
    found = _ACTION.fullmatch(text.strip(" \t"))
    if not found:
        raise ValueError(f"{short(text)} is not an action such as 0F1, 2SEND_B0@1 or 3REDUCE_GRAD")
    stage, do, microbatch, peer = found.groups()
    other = int(peer) if peer else None
    if other is None and do in _NEIGHBOUR:
        other = int(stage) + _NEIGHBOUR[Do(do)]
    return Action(int(stage), Do(do), int(microbatch) if microbatch else None, other)


SENDS = {Do.SEND_F: Do.RECV_F, Do.SEND_B: Do.RECV_B}
RECEIVES = frozenset(SENDS.values())


def received_as(sent: Action) -> Action:
    """The receive that belongs to a send."""
    assert sent.peer is not None
    return Action(sent.peer, SENDS[sent.do], sent.microbatch, sent.stage)


@attrs.frozen
class Schedule:
    """Per rank the actions in their order."""

    ranks: tuple[tuple[Action, ...], ...]

    @property
    def microbatches(self) -> int:
        indices = [a.microbatch for rank in self.ranks for a in rank if a.microbatch is not None]
        return 1 + max(indices, default=-1)

    @property
    def stages(self) -> int:
        return 1 + max((action.stage for rank in self.ranks for action in rank), default=-1)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of each stage. Raises ValueError if a stage is computed on two, or nowhere."""
        found: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                if action.do.kind and found.setdefault(action.stage, rank) != rank:
                    raise ValueError(
                        f"stage {action.stage} runs on ranks {found[action.stage]} and {rank}"
                    )
        if len(found) < self.stages:
            missing = next(stage for stage in range(self.stages) if stage not in found)
            raise ValueError(f"stage {missing} runs on no rank")
        return tuple(found[stage] for stage in range(self.stages))

    def computing(self) -> "Schedule":
        """Without the actions that `lower` puts in."""
        return Schedule(tuple(tuple(a for a in rank if a.do.kind) for rank in self.ranks))

    def to_csv(self) -> str:
        """A row a rank, a cell an action, as torch.distributed.pipelining writes it."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(map(str, rank) for rank in self.ranks)
        return text.getvalue()

    @staticmethod
    def from_csv(text: str) -> "Schedule":
        """Reads a CSV of this class or of torch's; empty cells are left out.

        Raises ValueError for a cell that is no action, with its rank, for a text without a row
        and for one of more than 64 MiB or 4 million cells.
        """
        if not text:
            raise ValueError("this is not the CSV of a schedule: it is empty")
        if len(text) > plain.LARGEST_FILE or text.count(",") > plain.MOST_ITEMS:
            raise ValueError(
                f"a CSV of more than {plain.LARGEST_FILE} characters or {plain.MOST_ITEMS} cells"
            )
        try:
            rows = list(csv.reader(io.StringIO(text), strict=True))
        except csv.Error as error:
            raise ValueError(f"this is not CSV: {error}") from None
        return Schedule(tuple(_row(rank, cells) for rank, cells in enumerate(rows)))


def _row(rank: int, cells: list[str]) -> tuple[Action, ...]:
    actions = []
    for index, cell in enumerate(cells):
        if cell == "":
            continue
        try:
            actions.append(parse_action(cell))
        except ValueError as error:
            raise ValueError(f"rank {rank}, cell {index}: {error}") from None
    return tuple(actions)


@attrs.frozen
class Event:
    """One action of one rank with its start and end, in seconds since the step began."""

    rank: int = attrs.field(validator=checks.not_negative)
    action: Action
    start: float = attrs.field(validator=checks.seconds)
    end: float = attrs.field(validator=checks.seconds)

    def __attrs_post_init__(self) -> None:
        if not self.end >= self.start:
            raise ValueError(f"Event: {self.action} ends at {self.end}, begins at {self.start}")


@attrs.frozen
class Timeline:
    """What ran when, predicted or measured."""

    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """From the step's begin to the end of the last action."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they compute nothing."""
        ranks = {event.rank for event in self.events}
        busy = sum(event.end - event.start for event in self.events if event.action.do.kind)
        return 1 - busy / (len(ranks) * self.seconds) if self.seconds else 0.0


@attrs.frozen
class MemoryPoint:
    """Bytes that a rank holds beside what it holds all the time: the most during an action, and
    after it."""

    action: Action
    peak: int
    after: int

    def __attrs_post_init__(self) -> None:
        if self.peak < self.after:
            raise ValueError(f"MemoryPoint: {self.action} leaves {self.after} bytes, over its peak")


@attrs.frozen
class MemoryCurve:
    """The bytes of one rank through a step, predicted or measured.

    `held` is what is there before and after, by what it is (parameters, buffers, batch,
    optimizer, receive buffers). `at_peak` says of a prediction what the rest is at its peak
    (gradients, saved, received, temporaries, outputs).
    """

    rank: int = attrs.field(validator=checks.not_negative)
    held: dict[str, int] = attrs.field(validator=checks.each(checks.not_negative))
    points: tuple[MemoryPoint, ...]
    at_peak: dict[str, int] = attrs.field(factory=dict, validator=checks.each(checks.not_negative))

    @property
    def peak(self) -> int:
        return sum(self.held.values()) + max((point.peak for point in self.points), default=0)


@attrs.frozen
class RecomputeOption:
    """What one stage computes again in its backward instead of saving it.

    `names` are nodes of the stage's forward; what they read and is not named is saved. Then a
    microbatch keeps `saved` bytes from forward to backward, and its backward takes
    `extra_seconds` more.
    """

    saved: int = attrs.field(default=0, validator=checks.not_negative)
    extra_seconds: float = attrs.field(default=0.0, validator=checks.seconds)
    names: tuple[str, ...] = ()


@attrs.frozen
class Plan:
    """Where to cut, where to run, and in which order.

    `stage_of_cluster` has a stage for every cluster; the stages' ranks are those of the
    schedule. Values of the nodes named in `duplicated` are computed by every stage that reads
    them instead of sent. `recompute` has an option for every stage, or is empty: then all that a
    backward reads is saved. `stage_seconds` (forward and backward of one microbatch) and
    `step_seconds` are what the planner expects, None if it knew no costs; no schedule of these
    stages on these ranks takes less than `bound_seconds`. Raises ValueError if the schedule has
    fewer stages, or if there is not one entry for every stage.
    """

    stage_of_cluster: tuple[int, ...] = attrs.field(validator=checks.each(checks.not_negative))
    schedule: Schedule
    duplicated: tuple[str, ...] = ()
    stage_seconds: tuple[float, ...] | None = attrs.field(default=None, validator=_EACH_SECONDS)
    step_seconds: float | None = attrs.field(default=None, validator=checks.seconds)
    bound_seconds: float | None = attrs.field(default=None, validator=checks.seconds)
    recompute: tuple[RecomputeOption, ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.stages > self.schedule.stages:
            raise ValueError(
                f"Plan: the clusters are in {self.stages} stages, the schedule runs "
                f"{self.schedule.stages}"
            )
        for field in ("stage_seconds", "recompute"):
            entries = getattr(self, field)
            if entries and len(entries) != self.stages:
                raise ValueError(f"Plan.{field}: {len(entries)} entries for {self.stages} stages")

    @property
    def stages(self) -> int:
        return 1 + max(self.stage_of_cluster, default=-1)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        return self.schedule.stage_ranks


@attrs.frozen
class Mesh:
    """`replicas` pipelines of `ranks` ranks each; pipeline r has the global ranks from
    r * ranks on, so that neighbours in a pipeline are neighbours in the world."""

    ranks: int = attrs.field(validator=checks.positive)
    replicas: int = attrs.field(default=1, validator=checks.positive)

    @property
    def size(self) -> int:
        return self.ranks * self.replicas
