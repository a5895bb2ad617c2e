"""What every rank does in which order: actions, schedules and their CSV."""

import csv
import io
import re
from collections.abc import Callable
from enum import StrEnum
from functools import cached_property
from reprlib import repr as short
from typing import Self

import attrs

from pfeife.data import checks, plain
from pfeife.ir.parts import Kind


class Do(StrEnum):
    """What an action does, in the words of torch.distributed.pipelining's CSV.

    `words` are those of errors, and `drawn` is the name of its colour in `report.What`.
    """

    FORWARD = "F", "the forward", "forward"
    BACKWARD = "B", "the backward", "backward"
    INPUT_BACKWARD = "I", "the input-backward", "input-backward"
    WEIGHT_BACKWARD = "W", "the weight-backward", "weight-backward"
    SEND_F = "SEND_F", "sending activations", "send"
    RECV_F = "RECV_F", "receiving activations", "receive"
    SEND_B = "SEND_B", "sending gradients", "send"
    RECV_B = "RECV_B", "receiving gradients", "receive"
    REDUCE_GRAD = "REDUCE_GRAD", "the reduction of gradients", "reduce"
    UNSHARD = "UNSHARD", "telling members parameters", "unshard"
    RESHARD = "RESHARD", "dropping parameters of other members", "unshard"

    words: str
    drawn: str

    def __new__(cls, text: str, words: str = "", drawn: str = "") -> Self:
        do = str.__new__(cls, text)
        do._value_, do.words, do.drawn = text, words, drawn
        return do

    @property
    def kind(self) -> Kind | None:
        """The call that an action of computation runs; None for the others."""
        return _KINDS.get(self)  # a StrEnum is its text


_KINDS = {kind.value: kind for kind in Kind}
# Which stage the other end of a transfer is, seen from this one, in a chain of stages.
_NEIGHBOUR = {Do.SEND_F: 1, Do.RECV_F: -1, Do.SEND_B: -1, Do.RECV_B: 1}


@attrs.frozen
class Action:
    """One thing that a rank does for one stage and one microbatch (None: once a step).

    A send's `stage` is the one that made the values and its `peer` the first stage of the other
    rank that reads them; a receive's are the other way round. In the text form the peer is
    left out where it is the neighbour, so that chains of stages read as torch writes them.
    A reduction's `stage` is the first stage that has a part in the gradients; that of what tells
    members parameters, or drops these, the first stage of the rank that reads them.
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


# The longer names first: B would be found at the beginning of what follows it.
_DO = "|".join(sorted(Do, key=len, reverse=True))
_ACTION = re.compile(rf"(\d{{1,18}})({_DO})(\d{{0,18}})(?:@(\d{{1,18}}))?", re.ASCII)


def parse_action(text: str) -> Action:
    """Reads what `str(action)` wrote, which torch's own text is a part of."""
    match = _ACTION.fullmatch(text.strip(" \t"))
    if not match:
        raise ValueError(f"{short(text)} is not an action such as 0F1, 2SEND_B0@1 or 3REDUCE_GRAD")
    stage, do, microbatch, peer = match.groups()
    peer_stage = int(peer) if peer else None
    # torch writes no peers: a transfer of its own is with the neighbour in the chain.
    if peer_stage is None and do in _NEIGHBOUR:
        peer_stage = int(stage) + _NEIGHBOUR[Do(do)]
    return Action(int(stage), Do(do), int(microbatch) if microbatch else None, peer_stage)


BESIDE = (Do.UNSHARD, Do.REDUCE_GRAD)  # one after another, beside what a rank computes
ONCE = (*BESIDE, Do.RESHARD)  # for all microbatches
SENDS = {Do.SEND_F: Do.RECV_F, Do.SEND_B: Do.RECV_B}
RECEIVES = frozenset(SENDS.values())


def received_as(sent: Action) -> Action:
    """The receive that belongs to a send."""
    assert sent.peer is not None
    return Action(sent.peer, SENDS[sent.do], sent.microbatch, sent.stage)


_SHOWN, _CELLS = 10, 16  # ranks and actions in a `repr`


@attrs.frozen(slots=False)
class Schedule:
    """Per rank the actions in their order: `ranks[r]` are those of rank r.

    A schedule as it is made has computations alone (F, B, or I and W); `lower` puts the sends,
    receives and reductions in, and what members tell one another. As text a row is a rank and a
    cell an action, stage, kind and microbatch: 1F1B of two stages and microbatches is

        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1

    Next: `sched.verify_schedule` proves that it runs to its end, `sched.simulate` gives its
    timeline, `sched.lower` puts the messages of a program in, `pfeife.Plan` says where to cut.
    """

    ranks: tuple[tuple[Action, ...], ...]

    @cached_property
    def microbatches(self) -> int:
        """How many there are: one more than the highest index of an action."""
        indices = [a.microbatch for rank in self.ranks for a in rank if a.microbatch is not None]
        return 1 + max(indices, default=-1)

    @cached_property
    def stages(self) -> int:
        """How many there are: one more than the highest index of an action."""
        return 1 + max((action.stage for rank in self.ranks for action in rank), default=-1)

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of each stage. Raises ValueError if a stage is computed on two, or nowhere."""
        rank_of: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                if action.do.kind and rank_of.setdefault(action.stage, rank) != rank:
                    raise ValueError(
                        f"stage {action.stage} runs on ranks {rank_of[action.stage]} and {rank}"
                    )
        if len(rank_of) < self.stages:
            missing = next(stage for stage in range(self.stages) if stage not in rank_of)
            raise ValueError(f"stage {missing} runs on no rank")
        return tuple(rank_of[stage] for stage in range(self.stages))

    def computing(self) -> "Schedule":
        """Without the actions that `lower` puts in."""
        return self._of(lambda action: action.do.kind is not None)

    def first(self, microbatches: int) -> "Schedule":
        """The schedule of the first microbatches alone.

        What is left keeps its order, so it deadlocks no more than before and needs no more memory.
        """
        return self._of(lambda a: a.microbatch is None or a.microbatch < microbatches)

    def _of(self, stays: Callable[[Action], bool]) -> "Schedule":
        return Schedule(tuple(tuple(filter(stays, rank)) for rank in self.ranks))

    def __repr__(self) -> str:
        """At most a page of it: ten ranks, the begin of each; and where the rest is."""
        lines = [f"Schedule({len(self.ranks)} ranks, {self.microbatches} microbatches)"]
        for rank, actions in enumerate(self.ranks[:_SHOWN]):
            text = ",".join(map(str, actions[:_CELLS]))
            lines.append(f"  rank {rank}: {text}{', ...' if len(actions) > _CELLS else ''}")
        lines += ["  ..."] * (len(self.ranks) > _SHOWN)
        return "\n".join([*lines, "  all of it: .to_csv(); its timeline: sched.simulate(...)"])

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
        # Bounded before it is read: csv would make lists of what is still to be refused.
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
        if cell == "":  # a bubble, in torch's files
            continue
        try:
            actions.append(parse_action(cell))
        except ValueError as error:
            raise ValueError(f"rank {rank}, cell {index}: {error}") from None
    return tuple(actions)
