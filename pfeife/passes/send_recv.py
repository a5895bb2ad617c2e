"""Sends and receives for everything that crosses ranks."""

import operator
from collections.abc import Callable, Iterable, Mapping

import attrs
from torch import fx

from pfeife import _torch
from pfeife.ir.absorb import absorb
from pfeife.ir.messages import call_of, holders
from pfeife.ir.nodes import is_source, receive, send
from pfeife.ir.parts import Call, Kind, Reduction, Role
from pfeife.ir.program import Program


def insert_send_recv(
    *, owners: Mapping[str, frozenset[int]] | None = None
) -> Callable[[Program], Program]:
    """A pass that gives every value that crosses ranks a send, a receive and a fresh name.

    Afterwards each call reads only values that its own rank defined or received. What one call
    makes goes to each reading rank once, in one message, however many calls read it there.
    Gradients that several ranks hold parts of get a `Reduction`; so do those of parameters that
    several ranks train by their `owners`, from earlier programs, though this one may use them on
    fewer. Raises ValueError if a call has no rank.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> flat = pfeife.capture(lambda x: net(x).square().mean(), torch.ones(2, 4))
    >>> plan = pfeife.Plan((0, 1), sched.families.one_f_one_b(2, 4))
    >>> ranks = pfeife.insert_send_recv()(pfeife.partition(plan)(pfeife.fuse()(flat)))
    >>> [(m.sender.node, m.source, m.destination, m.bytes) for m in messages(ranks)]
    [('stage_0_forward', 0, 1, 32), ('stage_1_backward', 1, 0, 32)]
    """

    def run(program: Program) -> Program:
        unplaced = [call.node for call in program.calls if call.rank is None]
        if unplaced:
            raise ValueError(f"{unplaced} have no rank; partition the program first")
        program = absorb(program)
        module = _torch.graph_module(program.module, _Sender(program).graph())
        shared = _shared_gradients(program, owners or {})
        return attrs.evolve(program, module=module, reductions=shared)

    return run


class _Sender:
    """A new graph, node by node, in which a value has a node of its own on each rank.

        before:  a = A(x)                b = B(a, c)        with A on rank 0 and B on rank 1
        after:   a = A(x), send (a,)     receive -> a_on_1, b = B(a_on_1, c)

    A message is sent right after what it carries is there, so that it travels while others compute,
    and received right before its first reader, so that no rank waits or holds memory early.
    """

    def __init__(self, program: Program):
        self.program = program
        self.calls = {call.node: call for call in program.calls}
        self.new = fx.Graph()
        # The node of an old value on a rank; of inputs, which are everywhere, on None.
        self.here: dict[tuple[fx.Node, int | None], fx.Node] = {}
        # What was sent and not received yet, by the call that made it and the rank that reads it.
        self.waiting: dict[tuple[str, int], tuple[fx.Node, list[fx.Node]]] = {}

    def graph(self) -> fx.Graph:
        nodes = list(self.program.module.graph.nodes)
        makers: dict[fx.Node, Call | None] = {}
        crossing: dict[fx.Node, dict[int, list[fx.Node]]] = {}
        for node in nodes:  # who reads what on which other rank
            makers[node] = self._maker(node, makers)
            reader = self.calls.get(node.name)
            for value in node.all_input_nodes if reader and node.op == "call_module" else ():
                maker = makers[value]
                assert reader is not None and reader.rank is not None
                if maker is not None and maker.rank != reader.rank:
                    values = crossing.setdefault(call_of(value), {}).setdefault(reader.rank, [])
                    values.extend([value] if value not in values else [])
        # The sends of a call stand behind the last of its results, which follow the call.
        for index, node in enumerate(nodes):
            if node.op == "output":
                results = {n: self._at(v, makers[v]) for n, v in node.args[0].items()}
                self.new.output(results)
            elif node.op == "call_module":
                self._call(node, makers)
            else:
                rank = makers[node].rank if makers[node] else None  # type: ignore[union-attr]
                copied = self.new.node_copy(node, lambda v, rank=rank: self._local(v, rank))  # type: ignore[misc]
                self.here[node, rank] = copied
            last = index + 1 == len(nodes) or nodes[index + 1].target is not operator.getitem
            if last and (maker := makers[node]) is not None and node.op != "output":
                self._send(call_of(node), crossing.pop(call_of(node), {}), maker)
        return self.new

    def _maker(self, node: fx.Node, makers: dict[fx.Node, Call | None]) -> Call | None:
        if is_source(node) or node.op == "output":
            return None
        return self.calls.get(node.name) or makers[node.all_input_nodes[0]]

    def _at(self, value: fx.Node, maker: Call | None) -> fx.Node:
        return self.here[value, maker.rank if maker else None]

    def _local(self, value: fx.Node, rank: int | None) -> fx.Node:
        """A value on a rank; inputs are everywhere."""
        return self.here.get((value, rank)) or self.here[value, None]

    def _call(self, node: fx.Node, makers: dict[fx.Node, Call | None]) -> None:
        call = self.calls[node.name]
        assert call.rank is not None
        for value in node.all_input_nodes:
            maker = makers[value]
            if maker is not None and (value, call.rank) not in self.here:
                self._receive(call_of(value).name, call.rank)
        copied = self.new.node_copy(node, lambda value: self._local(value, call.rank))
        # `program.calls` go by the names of their nodes
        assert copied.name == node.name
        self.here[node, call.rank] = copied

    def _send(self, call: fx.Node, readers: dict[int, list[fx.Node]], maker: Call) -> None:
        for rank, values in readers.items():
            message = tuple(self.here[value, maker.rank] for value in values)
            name = f"send_{call.name}_to_{rank}"
            sent = self.new.create_node(
                "call_function", send, (message, maker.rank, rank), name=name
            )
            self.waiting[call.name, rank] = (sent, values)

    def _receive(self, call: str, rank: int) -> None:
        sent, values = self.waiting.pop((call, rank))
        received = self.new.create_node(
            "call_function",
            receive,
            (sent, sent.args[1], rank),
            name=f"receive_{call}_on_{rank}",
        )
        for index, value in enumerate(values):
            copy = self.new.create_node(
                "call_function", operator.getitem, (received, index), name=f"{value.name}_on_{rank}"
            )
            copy.meta = dict(value.meta)
            self.here[value, rank] = copy


def _shared_gradients(
    program: Program, owners: Mapping[str, frozenset[int]]
) -> tuple[Reduction, ...]:
    trained = dict.fromkeys(port.fqn for port in program.ports(Role.GRADIENT))
    calls_of = holders(program)
    reductions = [reduction_of(name, calls_of[name], owners.get(name, ())) for name in trained]
    return tuple(reduction for reduction in reductions if len(reduction.ranks) > 1)


def reduction_of(
    name: str, calls: set[Call], others: Iterable[int] = (), replicas: int = 1
) -> Reduction:
    """The reduction of one gradient over all ranks whose calls use the parameter, and `others`."""
    ranks = tuple(sorted({*others, *(call.rank for call in calls if call.rank is not None)}))
    late = {call.unit for call in calls if call.kind != Kind.FORWARD}
    return Reduction(name, ranks, tuple(sorted(late)), replicas)
