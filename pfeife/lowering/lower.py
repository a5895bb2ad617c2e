"""Puts all that is sent into a schedule of computations: messages, reductions, parameters."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise

import attrs

from pfeife.data.schedule import BESIDE, SENDS, Action, Do, Schedule
from pfeife.ir.messages import Message
from pfeife.ir.parts import Kind, Reduction
from pfeife.ir.program import Program
from pfeife.lowering.coverage import check_coverage
from pfeife.lowering.telling import Kept, kept_by_stage
from pfeife.lowering.wiring import Wiring

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
        """The action that sends it for a microbatch."""
        do = Do.SEND_F if self.kind == Kind.FORWARD else Do.SEND_B
        return Action(self.stage, do, microbatch, self.peer)

    def receive(self, microbatch: int | None) -> Action:
        """The action that receives it for a microbatch."""
        do = Do.RECV_F if self.kind == Kind.FORWARD else Do.RECV_B
        return Action(self.peer, do, microbatch, self.stage)

    def made_by(self, action: Action) -> bool:
        """Whether an action computes what it sends."""
        return action.stage == self.stage and action.runs(self.kind)

    def read_by(self, action: Action) -> bool:
        """Whether an action reads what arrives."""
        return any(action.stage == stage and action.runs(kind) for stage, kind in self.readers)


def transfer_of(message: Message) -> Transfer:
    """A message of a program as the schedule sees it."""
    sender = message.sender
    return Transfer(sender.unit, sender.kind, message.reader, message.readers, message.bytes)


def chain(schedule: Schedule) -> tuple[Transfer, ...]:
    """The transfers of a chain of stages, for schedules without a program."""
    split = any(a.do == Do.INPUT_BACKWARD for actions in schedule.ranks for a in actions)
    backward = Kind.INPUT_BACKWARD if split else Kind.BACKWARD
    neighbours = pairwise(range(schedule.stages))
    return transfers_between(neighbours, schedule.stage_ranks, backward)


def transfers_between(
    edges: Iterable[tuple[int, int]],
    stage_ranks: Sequence[int],
    backward: Kind = Kind.INPUT_BACKWARD,
) -> tuple[Transfer, ...]:
    """What goes between stages on different ranks where each of these `edges`, from a stage to a
    later one, has a value ahead and its gradient back; in the order in which one stage sends."""
    between = [(a, b) for a, b in edges if stage_ranks[a] != stage_ranks[b]]
    ahead = [Transfer(a, Kind.FORWARD, b, ((b, Kind.FORWARD),)) for a, b in between]
    return (*ahead, *(Transfer(b, backward, a, ((a, backward),)) for a, b in between))


def lower(schedule: Schedule, program: Program, *, overlap: bool = True) -> Schedule:
    """The schedule with every transfer and reduction that a program with messages needs, and where
    members keep parameters with what tells them these.

    Without `overlap` reductions follow all that their rank computes. Raises ValueError if program
    and schedule do not fit together: other stages or ranks, a call that no action runs, one that
    comes before what it reads on its rank.
    """
    computing = schedule.computing()
    # Stages that a plan has made no calls for (a schedule of more stages) are nobody's, and
    # allowed.
    placed = {call.unit: call.rank for call in program.calls}
    if program.units > computing.stages:
        raise ValueError(f"{program.units} stages, but the schedule has {computing.stages}")
    for stage, rank in enumerate(computing.stage_ranks):
        if placed.get(stage, rank) != rank:
            raise ValueError(
                f"the schedule runs stage {stage} on rank {rank}, the program has it on "
                f"rank {placed[stage]}"
            )
    wiring = Wiring(program)
    transfers = list(map(transfer_of, wiring.messages))
    kept = kept_by_stage(wiring.program)
    lowered = insert_actions(computing, transfers, program.reductions, kept, overlap=overlap)
    check_coverage(lowered, wiring, kept)
    return lowered


def insert_actions(
    schedule: Schedule,
    transfers: Sequence[Transfer],
    reductions: Sequence[Reduction] = (),
    kept: Sequence[Kept] = (),
    *,
    overlap: bool = True,
) -> Schedule:
    """Transfers, reductions and parameters into a schedule of computations.

    A send follows the computation of its values; a receive precedes the first computation that
    reads them, and on every channel (pair of ranks) receives come in the order of the sends.
    A stage's reductions follow its last weight gradient, without `overlap` the last one of the
    rank. Those of several ranks come in one order on all of them, the last stage's first, and
    after a rank's own. Parameters that are `kept` begin to be told with the step, in the order in
    which stages compute with them, and are dropped after the last use.
    """
    # 1F1B of two stages on two ranks, microbatch 0; every line is one of the four steps below:
    #
    #     computing   0F0                 0B0          1F0 1B0
    #     sends       0F0 0SEND_F0        0B0          1F0 1B0 1SEND_B0
    #     receives    0F0 0SEND_F0  0RECV_B0 0B0       1RECV_F0 1F0 1B0 1SEND_B0
    #     reductions  ...  0B0 0REDUCE_GRAD            ... 1SEND_B0 1REDUCE_GRAD
    #     parameters  0UNSHARD 0F0 ... 0RESHARD        1UNSHARD 1RECV_F0 ... 1RESHARD
    sent, channels = _with_sends(schedule, _by_action(transfers, Transfer.made_by))
    read = _by_action(transfers, Transfer.read_by)
    together: dict[int, list[Reduction]] = {}
    for reduction in reductions:
        together.setdefault(reduction.stages[0], []).append(reduction)
    received = [
        _with_receives(actions, channels.get(rank, {}), read) for rank, actions in enumerate(sent)
    ]
    reduced = (
        _with_reductions(rank, actions, together, overlap) for rank, actions in enumerate(received)
    )
    return Schedule(
        tuple(
            _with_parameters(actions, [each for each in kept if each.rank == rank])
            for rank, actions in enumerate(reduced)
        )
    )


# What an action makes or reads depends on its stage and on what it does; and the messages that
# one rank sends to another, in their order, by the two.
_ByAction = dict[tuple[int, Do], list[Transfer]]
_Channels = dict[int, dict[int, list[tuple[Transfer, int | None]]]]


def _by_action(
    transfers: Sequence[Transfer], concerns: Callable[[Transfer, Action], bool]
) -> _ByAction:
    by_action: _ByAction = {}
    for transfer in transfers:
        for stage in {transfer.stage, *(stage for stage, _ in transfer.readers)}:
            for do in (Do.FORWARD, *_BACKWARDS):
                if concerns(transfer, Action(stage, do)):
                    by_action.setdefault((stage, do), []).append(transfer)
    return by_action


def _with_sends(schedule: Schedule, made: _ByAction) -> tuple[list[list[Action]], _Channels]:
    """Every rank's actions with its sends, and what each rank is sent, by the source."""
    stage_ranks = schedule.stage_ranks
    sent: list[list[Action]] = []
    channels: _Channels = {}
    for rank, actions in enumerate(schedule.ranks):
        result = []
        for action in actions:
            result.append(action)
            for transfer in made.get((action.stage, action.do), ()):
                result.append(transfer.send(action.microbatch))
                channel = channels.setdefault(stage_ranks[transfer.peer], {}).setdefault(rank, [])
                channel.append((transfer, action.microbatch))
        sent.append(result)
    return sent, channels


def _with_receives(
    actions: list[Action],
    channels: Mapping[int, list[tuple[Transfer, int | None]]],
    read: _ByAction,
) -> list[Action]:
    # Transfers are told apart by where they are: to hash them takes as long as all the rest.
    first_read: dict[tuple[int, int | None], int] = {}
    for index, action in enumerate(actions):
        for transfer in read.get((action.stage, action.do), ()):
            first_read.setdefault((id(transfer), action.microbatch), index)
    before: dict[int, list[Action]] = {}  # from the last to the first
    for channel in channels.values():
        # A channel keeps its order, so a message that is needed late comes early if one that was
        # sent after it is needed early:
        #
        #     sent:  a, b      here:  RECV a, RECV b, reads b, reads a
        latest = len(actions)
        for transfer, k in reversed(channel):
            latest = min(latest, first_read.get((id(transfer), k), latest))
            before.setdefault(latest, []).append(transfer.receive(k))
    result: list[Action] = []
    for index, action in enumerate(actions):
        result += [*reversed(before.get(index, ())), action]
    return result + before.get(len(actions), [])[::-1]


@attrs.frozen
class _Due:
    """A rank's reductions of one action: named after their `first` stage, from `end` on there are
    all that it adds up, and `shared` with other ranks of the pipeline."""

    first: int
    end: int
    shared: bool

    @property
    def order(self) -> tuple[bool, int, int]:
        """A rank's own as they come due; then those of several, in one order on all of them."""
        return self.shared, 0 if self.shared else self.end, -self.first


def _with_reductions(
    rank: int, actions: list[Action], together: Mapping[int, Sequence[Reduction]], overlap: bool
) -> tuple[Action, ...]:
    """`together` are the reductions by their first stages, which their actions are named after."""
    # Stage 2 shares a weight with a stage of another rank, stage 0 has one of its own:
    #
    #     actions   2B1 2SEND_B1          0RECV_B1 0B1
    #     due                   2 shared              0 own
    #     result    2B1 2SEND_B1          0RECV_B1 0B1  0REDUCE_GRAD  2REDUCE_GRAD
    due = []
    for first, reductions in together.items():
        if any(rank in reduction.ranks for reduction in reductions):
            stages = {stage for reduction in reductions for stage in reduction.stages}
            end = _last_gradient(actions, stages if overlap else None)
            due.append(_Due(first, end, any(len(reduction.ranks) > 1 for reduction in reductions)))
    before: dict[int, list[Action]] = {}
    position = 0
    for group in sorted(due, key=lambda group: group.order):
        # never before an earlier one: ranks that share several would wait for each other
        position = max(position, group.end)
        while position < len(actions) and actions[position].do in SENDS:
            position += 1  # others wait for what is sent
        before.setdefault(position, []).append(Action(group.first, Do.REDUCE_GRAD))
    result: list[Action] = []
    for index, action in enumerate(actions):
        result += [*before.get(index, ()), action]
    return (*result, *before.get(len(actions), ()))


def _with_parameters(actions: tuple[Action, ...], kept: Sequence[Kept]) -> tuple[Action, ...]:
    first: dict[int, int] = {}
    last: dict[int, list[Action]] = {}
    for each in kept:
        uses = [
            index
            for index, action in enumerate(actions)
            if action.stage in each.users and (action.do.kind or action.do in BESIDE)
        ]
        first[each.stage] = uses[0]
        last.setdefault(uses[-1], []).append(Action(each.stage, Do.RESHARD))
    told = [Action(stage, Do.UNSHARD) for stage in sorted(first, key=first.__getitem__)]
    for index, action in enumerate(actions):
        told += [action, *last.get(index, ())]
    return tuple(told)


def _last_gradient(actions: Sequence[Action], stages: Collection[int] | None) -> int:
    """The place behind the last backward of some stages, or of all."""
    ends = (
        index + 1
        for index, action in enumerate(actions)
        if action.do in _BACKWARDS and (stages is None or action.stage in stages)
    )
    return max(ends, default=0)
