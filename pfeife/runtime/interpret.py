"""The loop and the table: one rank's schedule, whatever the transport."""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import attrs
import torch
from torch import fx

from pfeife import _torch
from pfeife.data.schedule import RECEIVES, SENDS, Action, Do, Schedule
from pfeife.ir.evaluate import (
    Divisor,
    Result,
    State,
    combined,
    loss_tangents,
    named_batch,
    step_inputs,
)
from pfeife.ir.program import STATE_ROLES, Call, Kind, Port, Program, Reduction, Role, returned
from pfeife.lowering.clocks import released
from pfeife.lowering.envelope import Channel, Envelope, Tensors
from pfeife.lowering.wiring import Wiring, summed_in_place
from pfeife.runtime.failure import explain


class Transport(Protocol):
    """What carries values between ranks. Ranks are those of one pipeline.

    `device` is where received values shall be, None for where they come from.
    """

    device: torch.device | None

    def expect(self, source: int, channel: Channel) -> None:
        """Announces the messages that will be received from a rank."""

    def send(self, destination: int, values: Tensors, envelope: Envelope) -> None:
        """Sends one message; returns before it has arrived."""

    def receive(self, source: int) -> Tensors:
        """The next message of the channel."""

    def release(self, destination: int, count: int) -> None:
        """Says that the first `count` messages to a rank that still count as sent have arrived."""

    def reduce(self, reduction: Reduction, part: torch.Tensor) -> torch.Tensor:
        """The reduced gradient, of this rank's part and the others'."""


@attrs.define(eq=False)
class Step:
    """What one rank knows during a step.

    `values` has one mapping a microbatch, `divided` what its loss is divided by; `at` is the index
    of the action under way, for those who look on from other threads.
    """

    transport: Transport
    values: list[dict[str, torch.Tensor]]
    divided: Sequence[Divisor]
    buffers: dict[str, torch.Tensor]
    sums: dict[str, torch.Tensor] = attrs.Factory(dict)
    results: list[dict[str, torch.Tensor]] = attrs.Factory(list)
    gradients: dict[str, torch.Tensor] = attrs.Factory(dict)
    at: int = 0


Observer = Callable[[Action], None]
Watch = Callable[[int], Observer]  # an observer for a rank
Handler = Callable[[Step, int | None], None]
# What runs an action, its microbatch, the values that it was the last to touch, and how many
# messages to which ranks have surely arrived after it.
Instruction = tuple[Handler, int | None, tuple[str, ...], tuple[tuple[int, int], ...]]


class RankRunner:
    """Runs one rank's part of a lowered schedule.

    Every action is bound to a handler once; a step is a loop over them. Values are dropped
    after their last use. Gradients are added up in the order of the schedule, which is that of
    the microbatches.
    """

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        rank: int,
        bodies: Mapping[str, Callable] | None = None,
    ):
        self.program, self.rank, self.bodies = program, rank, bodies or {}
        self.actions = schedule.ranks[rank]
        self.wiring = Wiring(program)
        self.outputs = _outputs_by_node(program)
        self.buffers = _updated_buffers(program)
        self.constants = _constants(program)
        self.envelopes: dict[str, Envelope] = {}
        table: dict[Action, Handler] = {}
        drops, known = self.wiring.last_uses(self.actions), released(schedule)[rank]
        self.instructions: list[Instruction] = []
        for index, action in enumerate(self.actions):
            key = attrs.evolve(action, microbatch=None)
            if key not in table:
                table[key] = self._bind(key)
            arrived = tuple(known.get(index, {}).items())
            self.instructions.append((table[key], action.microbatch, drops[index], arrived))
        self.expected: dict[tuple[int, int], dict[int, Channel]] = {}
        self.backward_begin = next(
            (i for i, a in enumerate(self.actions) if a.do in _BACKWARD_PHASE), len(self.actions)
        )
        self.has_parts = all(_forwards_first(actions) for actions in schedule.ranks)

    @cached_property
    def gradients(self) -> frozenset[str]:
        """The names of the parameters whose gradients this rank has after a step."""
        made = {p.fqn for p in self.program.ports(Role.GRADIENT) if self.computes(p)}
        return frozenset(made | {r.name for r in self.program.reductions if self.rank in r.ranks})

    def start(
        self,
        state: State,
        inputs: Sequence[Mapping[str, torch.Tensor]],
        divided: Sequence[Divisor],
        transport: Transport,
    ) -> Step:
        """A step on this rank: `state` by canonical names, `inputs` per microbatch by port,
        `divided` by what each microbatch's loss is."""
        held = {
            port.name: state[port.fqn]
            for port in self.program.ports(*STATE_ROLES)
            if port.fqn in state
        }
        place = transport.device
        held |= {n: v if place is None else v.to(place) for n, v in self.constants.items()}
        return Step(
            transport=transport,
            values=[held | dict(given) for given in inputs],
            divided=divided,
            buffers={name: held[name] for name in self.buffers if name in held},
            results=[{} for _ in inputs],
        )

    def run(
        self,
        step: Step,
        begin: int = 0,
        end: int | None = None,
        observe: Observer | None = None,
    ) -> Step:
        """The actions from `begin` to `end`, both indices into the rank's schedule.

        `observe` is called after each of them.
        """
        last = len(self.actions) if end is None else end
        release = step.transport.release
        step.at = begin
        try:
            for source, channel in self._expected(begin, last).items():
                step.transport.expect(source, channel)
            with torch.no_grad(), _torch.no_autocast():
                for step.at in range(begin, last):
                    handler, microbatch, drops, arrived = self.instructions[step.at]
                    handler(step, microbatch)
                    if drops:
                        values = step.values[microbatch]  # type: ignore[index]
                        for name in drops:
                            values.pop(name, None)
                    for destination, count in arrived:
                        release(destination, count)
                    if observe:
                        observe(self.actions[step.at])
        except Exception as error:
            explain(error, self.rank, self.actions[step.at])
            raise
        return step

    def _bind(self, action: Action) -> Handler:
        """The handler of an action of any microbatch."""
        if action.do.kind:
            return _in_turn([self._compute(call) for call in self.wiring.calls(action)])
        if action.do == Do.REDUCE_GRAD:
            return self._reduce(action.stage)
        return self._transfer(action)

    def _compute(self, call: Call) -> Handler:
        body = self.bodies.get(call.node) or self.program.body(call).forward
        reads, slots = self.wiring.arguments(call), self.wiring.results(call)
        summed = summed_in_place(self.program, call)
        keep = [
            (self._keeper(port, port.name in summed), name)
            for name, _ in slots
            for port in self.outputs.get(name, ())
        ]
        buffers = [n for n in reads if n in self.buffers] if call.kind == Kind.FORWARD else []

        def compute(step: Step, microbatch: int | None) -> None:
            values = step.values[microbatch]  # type: ignore[index]
            for name in buffers:
                values[name] = step.buffers[name]
            results = body(*[values[name] for name in reads])
            for name, index in slots:
                values[name] = results[index]
            for keeper, name in keep:
                keeper(step, microbatch, values[name])

        return compute

    def _keeper(self, port: Port, in_place: bool) -> Callable[[Step, Any, torch.Tensor], None]:
        """What is done with a value that is a result of the program."""
        name = port.name

        def add(step: Step, _: int, value: torch.Tensor) -> None:
            before = step.sums.get(name)
            if before is None:
                step.sums[name] = value
            elif in_place:
                before.add_(value)
            else:
                step.sums[name] = before + value

        def update(step: Step, _: int, value: torch.Tensor) -> None:
            step.buffers[slot] = value

        def note(step: Step, microbatch: int, value: torch.Tensor) -> None:
            step.results[microbatch][name] = value

        def note_loss(step: Step, microbatch: int, value: torch.Tensor) -> None:
            # Some kernels leave a scalar in a storage of many elements.
            step.results[microbatch][name] = value.clone()

        if port.role == Role.GRADIENT:
            return add
        if port.role == Role.BUFFER_UPDATE:
            slot = next(slot for slot, fqn in self.buffers.items() if fqn == port.fqn)
            return update
        return note_loss if port.role == Role.LOSS else note

    def _reduce(self, bucket: int) -> Handler:
        mine = [
            r for r in self.program.reductions if r.stages[0] == bucket and self.rank in r.ranks
        ]

        def reduce(step: Step, _: int | None) -> None:
            local = self._local_gradients(step)
            for reduction in mine:
                part = local.get(reduction.name)
                if part is None:  # read here, but without influence on the loss
                    part = self._zeros(reduction.name)
                step.gradients[reduction.name] = step.transport.reduce(reduction, part)

        return reduce

    def _zeros(self, name: str) -> torch.Tensor:
        port = next(port for port in self.program.ports(Role.GRADIENT) if port.fqn == name)
        return torch.zeros(port.shape, dtype=port.dtype, device=port.device)

    def _local_gradients(self, step: Step) -> dict[str, torch.Tensor]:
        """The sums of this rank by canonical names, several ports of one name in their order."""
        gradients: dict[str, torch.Tensor] = {}
        for port in self.program.ports(Role.GRADIENT):
            part = step.sums.get(port.name)
            if part is not None:
                before = gradients.get(port.fqn)
                gradients[port.fqn] = part if before is None else before + part
        return gradients

    def _transfer(self, action: Action) -> Handler:
        message = self.wiring.message(action)
        envelope = self.wiring.envelope(message)
        self.envelopes[message.node] = envelope
        names, copies = message.values, message.copies
        source, destination = message.source, message.destination

        def send(step: Step, microbatch: int | None) -> None:
            values = step.values[microbatch]  # type: ignore[index]
            step.transport.send(destination, tuple([values[n] for n in names]), envelope)

        def receive(step: Step, microbatch: int | None) -> None:
            arrived = step.transport.receive(source)
            step.values[microbatch].update(zip(copies, arrived, strict=True))  # type: ignore[index]

        return send if action.do in SENDS else receive

    def _expected(self, begin: int, end: int) -> dict[int, Channel]:
        """By their source the messages that arrive during a part of the schedule."""
        if (begin, end) not in self.expected:
            found: dict[int, list[Envelope]] = {}
            for action in self.actions[begin:end]:
                if action.do in RECEIVES:
                    message = self.wiring.message(action)
                    found.setdefault(message.source, []).append(self.envelopes[message.node])
            channels = {source: Channel(tuple(envelopes)) for source, envelopes in found.items()}
            self.expected[begin, end] = channels
        return self.expected[begin, end]

    def result(self, step: Step) -> Result:
        """What this rank knows of the step's result once its schedule has run."""
        program = self.program
        losses = [
            results[port.name]
            for results in step.results
            for port in program.ports(Role.LOSS)
            if port.name in results
        ]

        def by_name(role: Role) -> tuple[dict[str, torch.Tensor], ...]:
            ports = program.ports(role)
            return tuple({p.fqn: r[p.name] for p in ports if p.name in r} for r in step.results)

        updated = {
            port.fqn: step.buffers[slot]
            for port in program.ports(Role.BUFFER_UPDATE)
            for slot, fqn in self.buffers.items()
            if fqn == port.fqn and self.computes(port)
        }
        return Result(
            loss=combined(losses, step.divided) if losses else None,
            outputs=by_name(Role.OUTPUT),
            gradients=self._local_gradients(step) | step.gradients,
            buffers=updated,
            batch_gradients=by_name(Role.BATCH_GRADIENT),
        )

    def computes(self, port: Port) -> bool:
        """Whether this rank makes the value of an output port."""
        return owner(self.program, port) == self.rank


_BACKWARD_PHASE = (Do.BACKWARD, Do.INPUT_BACKWARD, Do.WEIGHT_BACKWARD, Do.RECV_B)


def _forwards_first(actions: Sequence[Action]) -> bool:
    """Whether a rank's backward actions all come after its forward actions."""
    rest = itertools.dropwhile(lambda action: action.do not in _BACKWARD_PHASE, actions)
    return not any(action.do in (Do.FORWARD, Do.RECV_F, Do.SEND_F) for action in rest)


def _in_turn(handlers: list[Handler]) -> Handler:
    if len(handlers) == 1:
        return handlers[0]

    def run(step: Step, microbatch: int | None) -> None:
        for handler in handlers:
            handler(step, microbatch)

    return run


def _outputs_by_node(program: Program) -> dict[str, list[Port]]:
    results = returned(program.module)
    found: dict[str, list[Port]] = {}
    for port in program.outputs:
        node = results[port.name]
        assert isinstance(node, fx.Node)
        found.setdefault(node.name, []).append(port)
    return found


def _updated_buffers(program: Program) -> dict[str, str]:
    """Buffer ports that a step updates, by port name, with their canonical names."""
    updated = {port.fqn for port in program.ports(Role.BUFFER_UPDATE)}
    return {port.name: port.fqn for port in program.ports(Role.BUFFER) if port.fqn in updated}


def _constants(program: Program) -> dict[str, torch.Tensor]:
    """Tensors that the step's own code makes from numbers, by their nodes in the graph."""
    nodes = [node for node in program.module.graph.nodes if node.op == "get_attr"]
    values = {node.name: operator.attrgetter(str(node.target))(program.module) for node in nodes}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def owner(program: Program, port: Port) -> int:
    """The rank that makes an output's value; rank 0 for one that is an input handed through."""
    results = returned(program.module)
    node = results[port.name]
    calls = {call.node: call for call in program.calls}
    while isinstance(node, fx.Node) and node.name not in calls and node.all_input_nodes:
        node = node.all_input_nodes[0]
    call = calls.get(node.name) if isinstance(node, fx.Node) else None
    return call.rank or 0 if call else 0


def microbatch_inputs(
    program: Program,
    microbatches: Sequence[object],
    seed: int,
    tangents: Sequence[Mapping[str, torch.Tensor]] | None,
    divided: Sequence[Divisor],
    replica: int = 0,
) -> list[dict[str, torch.Tensor]]:
    """The checked inputs of one replica's microbatches, by port name; `divided` are the divisors
    of all microbatches' losses."""
    count = len(microbatches)
    if count == 0 or count % program.replicas:
        raise ValueError(
            f"{count} microbatches cannot be dealt evenly to {program.replicas} replicas"
        )
    each = count // program.replicas
    arriving = loss_tangents(program, divided)
    return [
        arriving[index]
        | step_inputs(
            program,
            named_batch(program, microbatches[index], index),
            index,
            seed,
            tangents[index] if tangents is not None else None,
        )
        for index in range(replica * each, (replica + 1) * each)
    ]
