"""The loop: one rank's schedule, whatever the transport.

Every action of a lowered schedule is bound once to an instruction: its handler (the table of them
is in `handlers`), the values that nothing touches after it, which are dropped, and the messages
that have surely arrived by then (see `acknowledged`), which the transport lets go. Rank 0 of two
stages with two microbatches under 1F1B, for a first stage that multiplies x by a matrix:

    action      handler   drops                               releases
    0F0         compute
    0SEND_F0    send      the product (sent, and so kept)
    0F1         compute
    0SEND_F1    send      the product
    0RECV_B0    receive                                       to rank 1: a message, since what
    0B0         compute   x, both gradients (one is summed)   arrives was computed from it
    0RECV_B1    receive                                       to rank 1: a message
    0B1         compute   x, both gradients

A step is a loop over these lines; at its end it waits for what is still being reduced. All that a
rank takes and frees is in them, so the account of memory (`cost.memory_curves`) is this loop too,
over values that only have a size.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import attrs
import torch
from torch.profiler import record_function

from pfeife import _torch
from pfeife.data.schedule import RECEIVES, Action, Do, Schedule
from pfeife.ir.evaluate import Result, State, as_computed
from pfeife.ir.parts import STATE_ROLES, Port, Role
from pfeife.ir.program import Program
from pfeife.lowering.channel import MOST, MOST_QUEUED, Channel
from pfeife.lowering.clocks import Acknowledged, acknowledged
from pfeife.lowering.envelope import Envelope
from pfeife.lowering.wiring import Wiring
from pfeife.runtime.failure import explain
from pfeife.runtime.handlers import Handler, Handlers
from pfeife.runtime.results import result_of
from pfeife.runtime.step import Observer, Part, Step, Transport

MOST_SIZES = 64  # for which a rank keeps how its messages travel


class Instruction(NamedTuple):
    """What runs an action, on which microbatch (-1: on none), the values that nothing touches after
    it, and how many messages to which ranks have surely arrived by then."""

    handler: Handler
    microbatch: int
    drops: tuple[str, ...]
    arrived: tuple[tuple[int, int], ...]


class RankRunner:
    """Runs one rank's part of a lowered schedule.

    Gradients are added up in the order of the schedule, which is that of the microbatches.
    `arrivals` is what `acknowledged` says of the schedule: one answer does for all ranks' runners.
    """

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        rank: int,
        bodies: Mapping[str, Callable] | None = None,
        arrivals: Acknowledged | None = None,
    ):
        self.schedule, self.rank = schedule, rank
        self.actions = schedule.ranks[rank]
        self.wiring = Wiring(program)
        self.program = self.wiring.program
        self.constants = _constants(self.program)
        self.handlers = Handlers(self.wiring, rank, bodies or {})
        arrived = (acknowledged(schedule) if arrivals is None else arrivals)[rank]
        self.instructions = self._bound(arrived)
        self.sizes = tuple(port.name for port in self.program.ports(Role.SIZE))
        # A cache of this runner's own: one on the method would keep every runner.
        self._messages = functools.lru_cache(MOST_SIZES)(self._messages_at)

    def _bound(self, arrivals: Mapping[int, Mapping[int, int]]) -> list[Instruction]:
        table: dict[tuple[int, Do, int | None], Handler] = {}
        instructions = []
        drops = self.wiring.last_uses(self.actions)
        for index, action in enumerate(self.actions):
            # One handler for all microbatches of a kind of action: making one may write its code.
            key = action.stage, action.do, action.peer
            if key not in table:
                table[key] = self.handlers.of(action)
            microbatch = -1 if action.microbatch is None else action.microbatch
            arrived = tuple(arrivals.get(index, {}).items())
            instructions.append(Instruction(table[key], microbatch, drops[index], arrived))
        return instructions

    @cached_property
    def state(self) -> tuple[Port, ...]:
        """The ports of the state that the rank reads."""
        ports = self.program.ports(*STATE_ROLES)
        return tuple(port for port in ports if port.name in self.handlers.reads)

    @property
    def _on_cuda(self) -> bool:
        """Whether the step is computed there, for which it was captured."""
        return any(port.device.type == "cuda" for port in self.program.inputs)

    @cached_property
    def backward_start(self) -> int:
        """The index of the first action of the backward."""
        backward = (i for i, a in enumerate(self.actions) if a.do in _BACKWARD_PHASE)
        return next(backward, len(self.actions))

    @cached_property
    def has_phases(self) -> bool:
        """Whether the schedule has all forwards before all backwards, on every rank."""
        return all(_forwards_first(actions) for actions in self.schedule.ranks)

    def start(
        self,
        state: State,
        part: Part,
        transport: Transport,
    ) -> Step:
        """A step on this rank: `state` by canonical names, `part` of its pipeline. Raises
        ValueError if that has another number of microbatches than the schedule."""
        count, expected = len(part.inputs), self.schedule.microbatches
        if count != expected:
            raise ValueError(
                f"a pipeline gets {count} microbatches, the schedule is for {expected}"
            )
        kept = self.handlers.told
        held = {p.name: as_computed(p, state[p.fqn]) for p in self.state if p.name not in kept}
        place = transport.device
        held |= {n: v if place is None else v.to(place) for n, v in self.constants.items()}
        sizes = tuple(part.inputs[0][name] for name in self.sizes)
        return Step(
            transport=transport,
            part=part,
            sizes=dict(zip(self.sizes, sizes, strict=True)),
            envelopes=self._messages(sizes).envelopes,
            values=[{**held, **inputs} for inputs in part.inputs],
            kept={n: state[n] for n in (port.fqn for port in kept.values()) if n in state},
            buffers={name: held[name] for name in self.handlers.buffers if name in held},
            results=[{} for _ in part.inputs],
        )

    def run(
        self,
        step: Step,
        start: int = 0,
        end: int | None = None,
        observe: Observer | None = None,
    ) -> Step:
        """The actions from `start` to `end`, both indices into the rank's schedule.

        `observe` is called after each of them.
        """
        last = len(self.actions) if end is None else end
        step.at = start
        try:
            for source, channel in self._expected(step, start, last).items():
                step.transport.expect(source, channel)
            with torch.no_grad(), _torch.no_autocast():
                self._loop(step, range(start, last), observe)
                if last == len(self.actions):
                    self._reduced(step)
        except Exception as error:
            explain(error, self.rank, self.actions[step.at])
            raise
        return step

    def _loop(self, step: Step, indices: range, observe: Observer | None) -> None:
        is_profiled = _torch.is_profiled()
        # The loop's variable is the step's own field: other threads look where the rank is.
        for step.at in indices:
            handler, microbatch, drops, arrived = self.instructions[step.at]
            if is_profiled:
                with record_function(f"pfeife {self.actions[step.at]}"):
                    handler(step, microbatch)
            else:
                handler(step, microbatch)
            # Before the next action, not at the end of the stage: so does the account of memory.
            values = step.values[microbatch]
            for name in drops:
                values.pop(name, None)
            for destination, count in arrived:
                step.transport.release(destination, count)
            if observe:
                observe(self.actions[step.at])

    def _reduced(self, step: Step) -> None:
        """Waits for the gradients that are on their way."""
        for index, reducing in step.reducing:
            # What fails while it is waited for is blamed on the action that began it.
            step.at = index
            step.gradients |= reducing.wait()
            action = self.actions[step.at]
            step.ended[action] = max(step.ended.get(action, 0.0), reducing.ended)
        step.reducing.clear()

    def result(self, step: Step) -> Result:
        """What this rank has of the step's result, as far as it has run: see `joined`."""
        return result_of(self.program, self.rank, step)

    @property
    def envelopes(self) -> Mapping[str, Envelope]:
        """How messages travel at the sizes of the capture, by their nodes."""
        return self._messages(()).envelopes

    def _messages_at(self, sizes: tuple[int, ...]) -> "Messages":
        """This rank's messages where the size ports have such values, in their order."""
        named = dict(zip(self.sizes, sizes, strict=False))
        messages = self.handlers.messages.items()
        return Messages({node: self.wiring.envelope(message, named) for node, message in messages})

    def _expected(self, step: Step, start: int, end: int) -> dict[int, Channel]:
        """By their source the messages that arrive during a part of the schedule."""
        expected = self._messages(tuple(step.sizes.values())).expected
        if (start, end) not in expected:
            envelopes_of: dict[int, list[Envelope]] = {}
            for action in self.actions[start:end]:
                if action.do in RECEIVES:
                    message = self.wiring.message(action)
                    envelopes_of.setdefault(message.source, []).append(step.envelopes[message.node])
            most = MOST_QUEUED if self._on_cuda else MOST
            expected[start, end] = {
                source: Channel(tuple(envelopes), most)
                for source, envelopes in envelopes_of.items()
            }
        return expected[start, end]


@attrs.frozen(eq=False)
class Messages:
    """A rank's messages at certain sizes: how they travel, by their nodes, and by parts of the
    schedule what is expected from each source."""

    envelopes: Mapping[str, Envelope]
    expected: dict[tuple[int, int], dict[int, Channel]] = attrs.field(factory=dict)


_BACKWARD_PHASE = (Do.BACKWARD, Do.INPUT_BACKWARD, Do.WEIGHT_BACKWARD, Do.RECV_B)


def _forwards_first(actions: Sequence[Action]) -> bool:
    """Whether a rank's backward actions all come after its forward actions."""
    rest = itertools.dropwhile(lambda action: action.do not in _BACKWARD_PHASE, actions)
    return not any(action.do in (Do.FORWARD, Do.RECV_F, Do.SEND_F) for action in rest)


def _constants(program: Program) -> dict[str, torch.Tensor]:
    """Tensors that the step's own code makes from numbers, by their nodes in the graph."""
    nodes = [node for node in program.module.graph.nodes if node.op == "get_attr"]
    values = {node.name: operator.attrgetter(str(node.target))(program.module) for node in nodes}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
