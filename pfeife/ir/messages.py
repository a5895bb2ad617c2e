"""Who reads and makes what in a program of calls: state, and messages between ranks."""

import attrs
from torch import fx

from pfeife.ir.absorb import absorb
from pfeife.ir.nodes import node_bytes, returned, send
from pfeife.ir.parts import Call, Role
from pfeife.ir.program import Program


def call_of(value: fx.Node) -> fx.Node:
    """The call node that makes a value of a graph of calls, or the node itself."""
    while value.op != "call_module" and value.all_input_nodes:
        value = value.all_input_nodes[0]
    return value


def holders(program: Program, *roles: Role) -> dict[str, set[Call]]:
    """For every parameter (or state of other `roles`) the calls that read it, or make a part of
    its gradient or its update; a parameter that the step updates has the role of a buffer."""
    program = absorb(program)
    kinds = {*(roles or (Role.PARAMETER, Role.BUFFER)), Role.GRADIENT, Role.BUFFER_UPDATE}
    wanted = {port.fqn for port in program.ports(*(roles or (Role.PARAMETER, Role.GRADIENT)))}
    names = {p.name: p.fqn for p in program.ports(*kinds) if p.fqn in wanted}
    calls = {call.node: call for call in program.calls}
    calls_of: dict[str, set[Call]] = {}
    for node in program.module.graph.nodes:
        if node.name in names:
            users = [calls[user.name] for user in node.users if user.name in calls]
            calls_of.setdefault(names[node.name], set()).update(users)
    for name, value in returned(program.module).items():
        if name in names and call_of(value).name in calls:
            calls_of.setdefault(names[name], set()).add(calls[call_of(value).name])
    return calls_of


@attrs.frozen
class Message:
    """Values that one call's rank sends to another rank, together.

    `reader` is the first stage of the destination that reads them; `values` are the names at
    the source, `copies` those at the destination.
    """

    sender: Call
    reader: int
    source: int
    destination: int
    node: str
    values: tuple[str, ...]
    copies: tuple[str, ...]
    bytes: int


def messages(program: Program) -> tuple[Message, ...]:
    """All messages of a program with sends and receives, in the order of the sends."""
    program = absorb(program)
    calls = {call.node: call for call in program.calls}
    order = {call: index for index, call in enumerate(program.calls)}
    sent = []
    for node in program.module.graph.nodes:
        if node.target is not send:
            continue
        values, source, destination = node.args
        (received,) = node.users
        copies = sorted(received.users, key=lambda copy: copy.args[1])
        readers = [calls[user.name] for copy in copies for user in copy.users if user.name in calls]
        sent.append(
            Message(
                sender=calls[values[0].args[0].name],
                reader=min(readers, key=order.__getitem__).unit,
                source=source,
                destination=destination,
                node=node.name,
                values=tuple(value.name for value in values),
                copies=tuple(copy.name for copy in copies),
                bytes=sum(node_bytes(value) for value in values),
            )
        )
    return tuple(sent)
