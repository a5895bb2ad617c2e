"""Puts sends, receives and reductions into a schedule of computations."""

from collections.abc import Sequence

import attrs

from pfeife.data.schedule import SENDS, Action, Do, Schedule
from pfeife.ir.program import Kind, Message, Program, Reduction, find_node, messages
from pfeife.lowering.fit import check_fit

_BACKWARDS = (Do.BACKWARD, Do.INPUT_BACKWARD, Do.WEIGHT_BACKWARD)


@attrs.frozen
class Transfer:
    """What one stage's forward or input-backward sends to another rank for each microbatch.

    `readers` are the computations of the destination that read it, `peer` the first of their
    stages. `bytes` is the size, None where it is not known.
    """

    stage: int
    kind: Kind
    peer: int
    readers: tuple[tuple[int, Kind], ...]
    bytes: int | None = None

    def send(self, microbatch: int | None) -> Action:
        do = Do.SEND_F if self.kind == Kind.FORWARD else Do.SEND_B
        return Action(self.stage, do, microbatch, self.peer)

    def receive(self, microbatch: int | None) -> Action:
        do = Do.RECV_F if self.kind == Kind.FORWARD else Do.RECV_B
        return Action(self.peer, do, microbatch, self.stage)

    def made_by(self, action: Action) -> bool:
        return action.stage == self.stage and action.runs(self.kind)

    def read_by(self, action: Action) -> bool:
        return any(action.stage == stage and action.runs(kind) for stage, kind in self.readers)


def transfer_of(program: Program, message: Message) -> Transfer:
    """A message of a program as the schedule sees it."""
    calls = {call.node: call for call in program.calls}
    readers = {
        (calls[user.name].unit, calls[user.name].kind)
        for copy in message.copies
        for user in find_node(program.module, copy).users
        if user.name in calls
    }
    sender = message.sender
    return Transfer(sender.unit, sender.kind, message.reader, tuple(sorted(readers)), message.bytes)


def chain(schedule: Schedule) -> tuple[Transfer, ...]:
    """The transfers of a chain of stages, for schedules without a program."""
    split = any(a.do == Do.INPUT_BACKWARD for actions in schedule.ranks for a in actions)
    backward = Kind.INPUT_BACKWARD if split else Kind.BACKWARD
    ranks = schedule.stage_ranks
    borders = [s for s in range(schedule.stages - 1) if ranks[s] != ranks[s + 1]]
    forwards = [Transfer(s, Kind.FORWARD, s + 1, ((s + 1, Kind.FORWARD),)) for s in borders]
    gradients = [Transfer(s + 1, backward, s, ((s, backward),)) for s in borders]
    return (*forwards, *gradients)


def lower(schedule: Schedule, program: Program) -> Schedule:
    """The schedule with every transfer and reduction that a program with messages needs.

    Raises ValueError if program and schedule do not fit together: other stages or ranks, a call
    that no action runs, one that comes before what it reads on its rank.
    """
    computing = schedule.computing()
    placed = {call.unit: call.rank for call in program.calls}
    if program.units > computing.stages:
        raise ValueError(f"{program.units} stages, but the schedule has {computing.stages}")
    for stage, rank in enumerate(computing.stage_ranks):
        if placed.get(stage, rank) != rank:
            raise ValueError(
                f"the schedule runs stage {stage} on rank {rank}, the program has it on "
                f"rank {placed[stage]}"
            )
    transfers = [transfer_of(program, message) for message in messages(program)]
    lowered = insert_actions(computing, transfers, program.reductions)
    check_fit(lowered, program)
    return lowered


def insert_actions(
    schedule: Schedule, transfers: Sequence[Transfer], reductions: Sequence[Reduction] = ()
) -> Schedule:
    """Transfers and reductions into a schedule of computations.

    A send follows the computation of its values; a receive precedes the first computation that
    reads them, and on every channel (pair of ranks) receives come in the order of the sends.
    Reductions follow the last gradient of their rank, the last stage's first, in one order on
    all ranks; those of several ranks follow all computation.
    """
    sent = [_with_sends(actions, transfers) for actions in schedule.ranks]
    home = schedule.stage_ranks
    return Schedule(
        tuple(
            _with_reductions(rank, _with_receives(rank, sent, home, transfers), reductions)
            for rank in range(len(sent))
        )
    )


def _with_sends(actions: Sequence[Action], transfers: Sequence[Transfer]) -> list[Action]:
    result: list[Action] = []
    for action in actions:
        result.append(action)
        result += [t.send(action.microbatch) for t in transfers if t.made_by(action)]
    return result


def _with_receives(
    rank: int, sent: list[list[Action]], home: Sequence[int], transfers: Sequence[Transfer]
) -> list[Action]:
    actions = sent[rank]
    first_read: dict[tuple[Transfer, int | None], int] = {}
    arriving = [t for t in transfers if home[t.peer] == rank]
    for index, action in enumerate(actions):
        for transfer in arriving:
            if transfer.read_by(action):
                first_read.setdefault((transfer, action.microbatch), index)
    before: dict[int, list[Action]] = {}
    for source in range(len(sent)):
        channel = {t.send(None): t for t in arriving if home[t.stage] == source}
        needed = []
        for action in sent[source]:
            found = channel.get(attrs.evolve(action, microbatch=None))
            if found is not None:
                at = first_read.get((found, action.microbatch), len(actions))
                needed.append((at, found.receive(action.microbatch)))
        latest = len(actions)
        for at, receive in reversed(needed):  # a later message may be needed earlier
            latest = min(latest, at)
            before.setdefault(latest, []).insert(0, receive)
    result: list[Action] = []
    for index, action in enumerate(actions):
        result += [*before.get(index, ()), action]
    return result + before.get(len(actions), [])


def _with_reductions(
    rank: int, actions: list[Action], reductions: Sequence[Reduction]
) -> tuple[Action, ...]:
    result, position = list(actions), 0
    mine = {r.stages[0] for r in reductions if rank in r.ranks}
    for bucket in sorted(mine, reverse=True):
        together = [r for r in reductions if r.stages[0] == bucket]
        # Ranks wait for one another here, so none may still owe another one a gradient.
        shared = any(len(r.ranks) > 1 for r in together)
        stages = {stage for r in together for stage in r.stages}
        ends = [
            index + 1
            for index, action in enumerate(result)
            if action.do in _BACKWARDS and (shared or action.stage in stages)
        ]
        position = max([position, *ends])
        while position < len(result) and result[position].do in SENDS:
            position += 1  # others wait for what is sent
        result.insert(position, Action(bucket, Do.REDUCE_GRAD))
        position += 1
    return tuple(result)
