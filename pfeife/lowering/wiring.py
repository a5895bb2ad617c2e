"""What an action of a schedule runs, reads and makes in a program; when values are dropped."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import attrs
from torch import fx

from pfeife import _torch
from pfeife.data.schedule import RECEIVES, SENDS, Action, Do
from pfeife.ir.editing.absorb import absorb
from pfeife.ir.messages import Message, messages
from pfeife.ir.nodes import find_node, is_sized_by_data, returned
from pfeife.ir.outline import own_results
from pfeife.ir.parts import STATE_ROLES, Call, Kind, Port, Role
from pfeife.ir.program import Program
from pfeife.lowering.envelope import Envelope, Layout

_PLANNED: Mapping[str, int] = {}


def summed_in_place(program: Program, call: Call) -> set[str]:
    """The gradient ports of a call whose first microbatch's value may take up the later ones':
    nobody else sees its storage."""
    results = returned(program.module)
    body, node = program.body(call), find_node(program.module, call.node)
    ports: dict[fx.Node, list[Port]] = {}
    for port in program.outputs:
        ports.setdefault(results[port.name], []).append(port)
    names, own = set(), own_results(body)
    for user in node.users:
        user_ports = ports.get(user, [])
        # else the sum would show in another port, or to another reader, of the same storage
        alone = len(user_ports) == 1 and user_ports[0].role == Role.GRADIENT
        if alone and len(user.users) == 1 and user.args[1] in own:
            names.add(user_ports[0].name)
    return names


def _layout(node: fx.Node, sizes: Mapping[str, int]) -> Layout:
    """How a node's value is laid out where the size ports have such values."""
    value, symbolic = node.meta["val"], node.meta.get("sizes")
    if not (symbolic and sizes):
        return Layout.of(value)
    shape, strides = (_torch.sizes_at(numbers, sizes) for numbers in symbolic)
    return Layout(shape, strides, value.dtype).dense()


def _absorbed(program: Program) -> Program:
    return absorb(program)


@attrs.frozen(eq=False, slots=False)
class Wiring:
    """A program seen from its schedule's actions: calls with all that they absorb, and messages."""

    program: Program = attrs.field(converter=_absorbed)

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """Those of the program, in the order of the sends."""
        return messages(self.program)

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        """By their names; `find_node` walks the graph."""
        return {node.name: node for node in self.program.module.graph.nodes}

    @cached_property
    def _of_unit(self) -> dict[int, list[Call]]:
        by_unit: dict[int, list[Call]] = {}
        for call in self.program.calls:
            by_unit.setdefault(call.unit, []).append(call)
        return by_unit

    @cached_property
    def _by_ends(self) -> dict[tuple[int, int | None, bool], Message]:
        """The messages by the stages at their ends, and whether a forward sends them."""
        return {
            (message.sender.unit, message.reader, message.sender.kind == Kind.FORWARD): message
            for message in reversed(self.messages)
        }

    def calls(self, action: Action) -> list[Call]:
        """The calls that an action of computation runs, in their order."""
        return [call for call in self._of_unit.get(action.stage, ()) if action.runs(call.kind)]

    def message(self, action: Action) -> Message:
        """The message that an action sends or receives. Raises ValueError if there is none."""
        sending = action.do in SENDS
        ends = (action.stage, action.peer) if sending else (action.peer, action.stage)
        message = self._by_ends.get((*ends, action.do in (Do.SEND_F, Do.RECV_F)))
        if message is None:
            raise ValueError(f"the program has no message for the action {action}")
        return message

    def envelope(self, message: Message, sizes: Mapping[str, int] = _PLANNED) -> Envelope:
        """How a message's values travel where the size ports have such values, by their names;
        those of the capture unless given."""
        nodes = [self.nodes[name] for name in message.values]
        by_data = tuple(index for index, node in enumerate(nodes) if is_sized_by_data(node))
        return Envelope(tuple(_layout(node, sizes) for node in nodes), by_data)

    def arguments(self, call: Call) -> tuple[str, ...]:
        """The names of the values that a call reads."""
        return tuple(node.name for node in self.nodes[call.node].all_input_nodes)

    def results(self, call: Call) -> tuple[tuple[str, int], ...]:
        """The values that a call makes: their names and where they stand in its result."""
        users = self.nodes[call.node].users
        return tuple((user.name, user.args[1]) for user in users)  # type: ignore[misc]

    def touched(self, action: Action) -> tuple[str, ...]:
        """The names of the values of its microbatch that an action reads or makes."""
        if action.do in SENDS:
            return self.message(action).values
        if action.do in RECEIVES:
            return self.message(action).copies
        names = [
            name
            for call in (self.calls(action) if action.do.kind else ())
            for name in (*self.arguments(call), *(name for name, _ in self.results(call)))
        ]
        return tuple(names)

    def last_uses(self, actions: Sequence[Action]) -> list[tuple[str, ...]]:
        """For every action of a rank the values of its microbatch that nothing touches after it.

        Parameters, constants and buffers stay; of a buffer that the step updates, every microbatch
        has a value of its own, and that goes.
        """
        updated = {port.fqn for port in self.program.ports(Role.BUFFER_UPDATE)}
        state = self.program.ports(*STATE_ROLES)
        stays = {p.name for p in state if p.role != Role.BUFFER or p.fqn not in updated}
        stays |= {node.name for node in self.program.module.graph.nodes if node.op == "get_attr"}
        # All microbatches touch the same names: each action is looked at once, not once a
        # microbatch.
        touched: dict[Action, tuple[str, ...]] = {}
        last: dict[tuple[int | None, str], int] = {}
        for index, action in enumerate(actions):
            key = attrs.evolve(action, microbatch=None)
            if key not in touched:
                touched[key] = tuple(name for name in self.touched(key) if name not in stays)
            last.update({(action.microbatch, name): index for name in touched[key]})
        drops: list[list[str]] = [[] for _ in actions]
        for (_, name), index in last.items():
            drops[index].append(name)
        return [tuple(names) for names in drops]
