"""Whether a lowered schedule does all that a program needs, on every rank in a possible order."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import fx

from pfeife.data.schedule import RECEIVES, SENDS, Action, Do, Schedule
from pfeife.ir.nodes import receive, send
from pfeife.ir.parts import Reduction, Role
from pfeife.ir.program import Program
from pfeife.lowering.telling import Kept
from pfeife.lowering.wiring import Wiring

_GRADIENTS = (Do.BACKWARD, Do.WEIGHT_BACKWARD)
_READS = (Do.FORWARD, Do.INPUT_BACKWARD, *_GRADIENTS, Do.REDUCE_GRAD)  # parameters


def check_coverage(schedule: Schedule, wiring: Wiring, kept: Iterable[Kept]) -> None:
    """Raises ValueError unless every rank runs each of its calls and transfers once for every
    microbatch, and none before what it reads on the same rank, parameters that are `kept` among it;
    and each of its reductions after the last gradient of their stages there. Gradients of which
    members have addends need one."""
    steps = _Steps(wiring)
    for rank, actions in enumerate(schedule.ranks):
        done: set[tuple[str, int | None]] = set()
        for action in actions:
            for name in steps.of(action).needs:
                if (name, action.microbatch) not in done:
                    raise ValueError(f"rank {rank}: {action} comes before {name}, which it reads")
            for name in steps.of(action).does:
                if (name, action.microbatch) in done:
                    raise ValueError(f"rank {rank}: {action} does {name} a second time")
                done.add((name, action.microbatch))
        wanted = [name for name, at in steps.rank_of.items() if at == rank]
        # By number first: which one is missing is only looked for if one is.
        if len(done) != len(wanted) * schedule.microbatches:
            name, k = _missing(wanted, schedule.microbatches, done)
            raise ValueError(
                f"rank {rank}: no action runs {name} for microbatch {k}; the schedule is not one "
                "of this program"
            )
    _check_added_up(wiring.program)
    for (rank, _), reduction in _by_time(wiring.program.reductions).items():
        _check_reduced(rank, schedule.ranks[rank], reduction)
    for each in kept:
        _check_told(schedule.ranks[each.rank], each)


def _check_added_up(program: Program) -> None:
    """Raises ValueError for a gradient whose addends stay where they are."""
    over = {reduction.name: reduction.members for reduction in program.reductions}
    for port in program.ports(Role.GRADIENT):
        if port.partial and over.get(port.fqn) != program.members:
            raise ValueError(
                f"each of {program.members} members has an addend of the gradient of {port.fqn}, "
                "and no reduction adds them up: pass the program through insert_send_recv"
            )


def _by_time(reductions: Iterable[Reduction]) -> dict[tuple[int, tuple[int, ...]], Reduction]:
    """One for each rank and stages that have parts in it."""
    return {
        (rank, reduction.stages): reduction for reduction in reductions for rank in reduction.ranks
    }


def _check_reduced(rank: int, actions: Sequence[Action], reduction: Reduction) -> None:
    wanted = Action(reduction.stages[0], Do.REDUCE_GRAD)
    if wanted not in actions:
        raise ValueError(f"rank {rank}: no {wanted}, which the gradient of {reduction.name} needs")
    for action in actions[actions.index(wanted) :]:
        if action.stage in reduction.stages and action.do in _GRADIENTS:
            raise ValueError(
                f"rank {rank}: {wanted} comes before {action}, which adds to the gradient of "
                f"{reduction.name}"
            )


def _check_told(actions: Sequence[Action], kept: Kept) -> None:
    told = False
    for action in actions:
        if action.stage == kept.stage and action.do in (Do.UNSHARD, Do.RESHARD):
            told = action.do == Do.UNSHARD
        elif action.stage in kept.users and action.do in _READS and not told:
            raise ValueError(
                f"rank {kept.rank}: {action} comes where members do not have "
                f"{kept.ports[0].fqn}, outside of {kept.stage}UNSHARD and {kept.stage}RESHARD"
            )


def _missing(
    wanted: list[str], microbatches: int, done: set[tuple[str, int | None]]
) -> tuple[str, int | None]:
    pairs = ((name, k) for k in range(microbatches) for name in wanted)
    return next(pair for pair in pairs if pair not in done)


class _Step(NamedTuple):
    """What an action needs of its rank and what it does there: names of calls, sends, receives."""

    needs: frozenset[str]
    does: frozenset[str]


class _Steps:
    """The steps of a program's actions, of any microbatch; `rank_of` has the rank of each name."""

    def __init__(self, wiring: Wiring):
        self.wiring, self.nodes = wiring, wiring.nodes
        self.rank_of = {call.node: call.rank for call in wiring.program.calls}
        for message in wiring.messages:
            self.rank_of[message.node] = message.source
            self.rank_of[self._arrival(message.node)] = message.destination
        self.known: dict[tuple, _Step] = {}

    def of(self, action: Action) -> _Step:
        key = (action.stage, action.do, action.peer)
        if key not in self.known:
            does = frozenset(self._names(action))
            reads = {_maker(source) for name in does for source in self._reads(name)}
            # a whole backward may run two calls, of which one reads what the other makes
            self.known[key] = _Step(frozenset(name for name in reads if name) - does, does)
        return self.known[key]

    def _names(self, action: Action) -> Iterator[str]:
        if action.do.kind:
            yield from (call.node for call in self.wiring.calls(action))
        elif action.do in SENDS:
            yield self.wiring.message(action).node
        elif action.do in RECEIVES:
            yield self._arrival(self.wiring.message(action).node)

    def _arrival(self, sent: str) -> str:
        (arrival,) = self.nodes[sent].users
        return arrival.name

    def _reads(self, name: str) -> list[fx.Node]:
        node = self.nodes[name]
        return [] if node.target is receive else node.all_input_nodes


def _maker(value: fx.Node) -> str | None:
    """The call or receive that a value is a part of; None for an input."""
    while value.op == "call_function" and value.target not in (send, receive):
        if not value.all_input_nodes:
            break
        value = value.all_input_nodes[0]
    return value.name if value.op.startswith("call") else None
