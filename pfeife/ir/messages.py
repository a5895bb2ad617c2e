"""Who makes and reads what: values, state, and messages between ranks; and a program as a networkx
graph of it."""

import operator
from typing import Any, NamedTuple

import attrs
import networkx as nx
from torch import fx

from pfeife.ir.editing.absorb import absorb
from pfeife.ir.flops import graph_flops, node_flops
from pfeife.ir.nodes import is_source, node_bytes, receive, returned, send
from pfeife.ir.parts import Call, Kind, ProgramBase, Role


def call_of(value: fx.Node) -> fx.Node:
    """The call node that makes a value of a graph of calls, or the node itself."""
    while value.op != "call_module" and value.all_input_nodes:
        value = value.all_input_nodes[0]
    return value


def holders(program: ProgramBase, *roles: Role) -> dict[str, set[Call]]:
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

    `readers` are the computations of the destination that read them, by stage and kind, `reader`
    the first stage of these; `values` are the names at the source, `copies` those at the
    destination.
    """

    sender: Call
    readers: tuple[tuple[int, Kind], ...]
    reader: int
    source: int
    destination: int
    node: str
    values: tuple[str, ...]
    copies: tuple[str, ...]
    bytes: int


def messages(program: ProgramBase) -> tuple[Message, ...]:
    """All messages of a program with sends and receives, in the order of the sends."""
    program = absorb(program)
    calls = {call.node: call for call in program.calls}
    order = {call: index for index, call in enumerate(program.calls)}
    sent = []
    for node in program.module.graph.nodes:
        if node.target is not send:
            continue
        values, source, destination = node.args
        # One receive for each send, and one part for each value of it: `verify` holds programs to
        # that.
        (received,) = node.users
        copies = sorted(received.users, key=lambda copy: copy.args[1])
        readers = [calls[user.name] for copy in copies for user in copy.users if user.name in calls]
        sent.append(
            Message(
                sender=calls[values[0].args[0].name],
                readers=tuple(sorted({(call.unit, call.kind) for call in readers})),
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


class Origin(NamedTuple):
    """What has made a value: a call or an operation, the value there, and whether it was sent."""

    maker: fx.Node
    value: fx.Node
    sent: bool = False


def origins(program: ProgramBase) -> dict[fx.Node, Origin]:
    """For every value of a program that is computed, where it comes from: parts of results and
    received copies are seen through."""
    origin_of: dict[fx.Node, Origin] = {}
    for node in program.module.graph.nodes:
        if is_source(node) or node.op == "output" or node.target in (send, receive):
            continue
        read = node.args[0] if node.target is operator.getitem else None
        if isinstance(read, fx.Node) and read.target is receive:
            #     a, b --> send((a, b), 0, 1) --> receive(send, 0, 1) --> getitem 0, of a
            value: Any = read.args[0].args[0][node.args[1]]  # type: ignore[union-attr, index]
            if value in origin_of:  # else an input that was sent
                origin_of[node] = origin_of[value]._replace(sent=True)
        elif isinstance(read, fx.Node) and read in origin_of:
            origin_of[node] = Origin(origin_of[read].maker, node, origin_of[read].sent)
        elif read is None:
            origin_of[node] = Origin(node, node)
    return origin_of


def to_networkx(program: ProgramBase) -> nx.DiGraph:
    """See `Program.graph`."""
    calls = {call.node: call for call in program.calls}
    origin_of = origins(program)
    graph = nx.DiGraph()
    for node, origin in origin_of.items():
        if origin.maker is node:
            graph.add_node(node.name, **_attributes(program, node, calls.get(node.name)))
        # a call's bytes are those of its results; their copies on other ranks are sent, not made
        if origin.maker is not node and not origin.sent and node.target is operator.getitem:
            graph.nodes[origin.maker.name]["bytes"] += node_bytes(node)
    for node in graph:
        for source in program.node(node).all_input_nodes:
            if source in origin_of:
                _add(graph, origin_of[source], node)
    return graph


def _attributes(program: ProgramBase, node: fx.Node, call: Call | None) -> dict[str, object]:
    if call is None:
        flops = node_flops(node) if node.op == "call_function" else 0
        name = getattr(node.target, "__name__", str(node.target))
        return {"kind": "op", "target": name, "flops": flops, "bytes": node_bytes(node)}
    flops = sum(graph_flops(program.body(call).graph).values())
    details = {"unit": call.unit, "rank": call.rank, "seconds": call.seconds}
    details = {name: value for name, value in details.items() if value is not None}
    return {"kind": call.kind.value, "target": node.target, "flops": flops, "bytes": 0, **details}


def _add(graph: nx.DiGraph, origin: Origin, reader: str) -> None:
    if not graph.has_edge(origin.maker.name, reader):
        graph.add_edge(origin.maker.name, reader, values=(), bytes=0, sent=False)
    edge = graph.edges[origin.maker.name, reader]
    if origin.value.name not in edge["values"]:
        edge["values"] += (origin.value.name,)
        edge["bytes"] += node_bytes(origin.value)
        edge["sent"] |= origin.sent
