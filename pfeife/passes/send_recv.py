"""Sends and receives for everything that crosses ranks."""

from collections.abc import Callable, Mapping

import attrs
from torch import fx

from pfeife.ir.editing.absorb import absorb
from pfeife.ir.editing.copying import Copy, copied
from pfeife.ir.messages import holders, origins
from pfeife.ir.nodes import receive, send
from pfeife.ir.parts import Reduction, Role
from pfeife.ir.program import Program
from pfeife.passes.reductions import reduction_of


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
        module = copied(program.module, _Sender(program).written).module("GraphModule")
        shared = _shared_gradients(program, owners or {})
        return attrs.evolve(program, module=module, reductions=shared)

    return run


class _Sender:
    """What a graph's nodes become, so that a value has a node of its own on each rank.

        before:  a = A(x)                b = B(a, c)        with A on rank 0 and B on rank 1
        after:   a = A(x), send (a,)     receive -> a_on_1, b = B(a_on_1, c)

    A message is sent right after what it carries is there, so that it travels while others compute,
    and received right before its first reader, so that no rank waits or holds memory early.
    """

    def __init__(self, program: Program):
        self.ranks = {call.node: call.rank for call in program.calls if call.rank is not None}
        # Inputs are everywhere, so nobody makes them.
        self.maker = {value: origin.maker for value, origin in origins(program).items()}
        self.crossing = self._crossing(program)
        # The last of a call's results, behind which its messages stand.
        self.last = {maker: value for value, maker in self.maker.items()}
        # What was sent and not received yet, by the call that made it and the rank that reads it.
        self.waiting: dict[tuple[fx.Node | None, int | None], fx.Node] = {}
        self.arrived: dict[tuple[fx.Node, int | None], fx.Node] = {}

    def _crossing(self, program: Program) -> dict[fx.Node, dict[int, dict[fx.Node, None]]]:
        """What a call makes for each other rank, in the order in which it is read there."""
        crossing: dict[fx.Node, dict[int, dict[fx.Node, None]]] = {}
        for node in program.module.graph.nodes:
            rank = self.ranks.get(node.name)
            for value in node.all_input_nodes if rank is not None else ():
                maker = self.maker.get(value)
                if rank is not None and maker is not None and self.ranks[maker.name] != rank:
                    crossing.setdefault(maker, {}).setdefault(rank, {})[value] = None
        return crossing

    def written(self, node: fx.Node, copy: Copy) -> fx.Node:
        """A node, behind the messages that it reads and before those that it makes complete."""
        rank = self.ranks.get(node.name)
        for value in node.all_input_nodes if rank is not None else ():
            if (self.maker.get(value), rank) in self.waiting:
                self._receive(self.maker[value], rank, copy)  # type: ignore[arg-type]
        # Inputs and values of its own rank have not arrived: they are read as they are.
        new = copy.keep(node, read=lambda value: self.arrived.get((value, rank), copy.here[value]))
        # `program.calls` go by the names of their nodes
        assert rank is None or new.name == node.name
        maker = self.maker.get(node)
        if maker is not None and self.last[maker] is node:
            self._send(maker, copy)
        return new

    def _send(self, maker: fx.Node, copy: Copy) -> None:
        source = self.ranks[maker.name]
        for rank, values in self.crossing.get(maker, {}).items():
            message = copy.read(tuple(values))
            name = f"send_{maker.name}_to_{rank}"
            self.waiting[maker, rank] = copy.graph.create_node(
                "call_function", send, (message, source, rank), name=name
            )

    def _receive(self, maker: fx.Node, rank: int, copy: Copy) -> None:
        sent = self.waiting.pop((maker, rank))
        name = f"receive_{maker.name}_on_{rank}"
        received = copy.graph.create_node(
            "call_function", receive, (sent, sent.args[1], rank), name=name
        )
        for index, value in enumerate(self.crossing[maker][rank]):
            self.arrived[value, rank] = copy.part(received, index, value, f"{value.name}_on_{rank}")


def _shared_gradients(
    program: Program, owners: Mapping[str, frozenset[int]]
) -> tuple[Reduction, ...]:
    trained = dict.fromkeys(port.fqn for port in program.ports(Role.GRADIENT))
    calls_of = holders(program)
    each = [reduction_of(program, name, calls_of[name], owners.get(name, ())) for name in trained]
    return tuple(r for r in each if len(r.ranks) > 1 or r.members > 1 or r.split)
