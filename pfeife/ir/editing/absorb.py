"""Plain nodes between calls: operations that a pass puts there, beside the bodies."""

import operator
from collections.abc import Iterator, Sequence

import attrs
import networkx as nx
import torch
from torch import fx

from pfeife.ir.editing.copying import Copy
from pfeife.ir.editing.infer_values import settle
from pfeife.ir.nodes import (
    has_effects,
    is_number,
    node_bytes,
    receive,
    send,
    source_line,
    value_of,
)
from pfeife.ir.parts import AProgram, ProgramBase


def absorb(program: AProgram) -> AProgram:
    """The same program, whose plain nodes between calls are parts of the calls' bodies.

        before   (a,) = A(x);  q = half(a);  f = float(q);  (b,) = B(f)
        after    (q,) = A(x);  (b,) = B(q)                  A ends with half, B begins with float

    A node goes to the call that makes the last of what it reads, or to those that read it: so that
    the fewest bytes wait, or travel, between them; to its maker where that makes no difference. It
    stays on its side of a message, and its `meta["side"]` may say "maker" or "reader". What several
    calls read, each of them computes. What nobody reads is left out. Whoever runs, lowers or
    accounts a program does this first; a program without such nodes is returned as it is. Raises
    ValueError for a node that has no place.
    """
    plain = plain_nodes(program)
    if not plain:
        return program
    # Asked first: a node without a place makes a cut of infinite capacity, which has no words.
    problems = list(misplaced(program))
    if problems:
        raise ValueError("; ".join(problems))
    if any("val" not in node.meta for node in plain):
        program = settle(program)  # tells how large they are
    return attrs.evolve(program, module=_Absorber(program).build())


def plain_nodes(program: AProgram) -> list[fx.Node]:
    """The nodes of a graph of calls that compute by themselves."""
    if not program.calls:
        return []
    return [node for node in program.module.graph.nodes if _is_plain(node)]


def _is_plain(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or node.target in (send, receive):
        return False
    return not (node.target is operator.getitem and _passes_on(node.args[0]))


def _passes_on(node: object) -> bool:
    """Whether a node has the results of a call, or a message's values."""
    return isinstance(node, fx.Node) and (node.op == "call_module" or node.target is receive)


def misplaced(program: AProgram) -> Iterator[str]:
    """What cannot become a part of a body, in words."""
    plain = plain_nodes(program)
    candidates = set(plain)
    for node in plain:
        reason = _refused(node)
        if reason:
            yield f"the plain node {node.name} {reason} ({source_line(node)})"
    first, last = _pinned(plain, candidates)
    for node in plain:
        if node in first and node in last and not _refused(node):
            yield (
                f"the plain node {node.name} is sent or returned, so that a call before it has to "
                "compute it, and it reads an input, a received value or a node of its readers, "
                f"which that call has not; put it into a body ({source_line(node)})"
            )


def _refused(node: fx.Node) -> str | None:
    if node.op == "call_method":
        return f"calls the method {node.target}; call a function of torch.ops instead"
    if has_effects(node):
        return "writes in place or has another effect; take the operation that returns a new value"
    for source in node.all_input_nodes:
        if source.target is send or _passes_on(source):
            return f"reads {source.name} as a whole; read its parts, by operator.getitem"
        if source.op == "get_attr" and value_of(source) is None and "val" in source.meta:
            return f"calls the graph {source.target}; put it into a body"
    return None


def _pinned(plain: list[fx.Node], candidates: set[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes that only a maker can have, since they are sent or returned, and what these read;
    and those that only a reader can have, for no call has made what they read, and who reads
    these."""
    first: set[fx.Node] = set()
    for node in reversed(plain):
        given_out = any(u.op == "output" or u.target is send or u in first for u in node.users)
        if given_out or node.meta.get("side") == "maker":
            first.add(node)
    last: set[fx.Node] = set()
    for node in plain:
        arrived = any(_arrived(source) for source in node.all_input_nodes)
        made = any(source in candidates or _made(source) for source in node.all_input_nodes)
        late = is_number(node) or node.meta.get("side") == "reader"
        if arrived or not made or late or not last.isdisjoint(node.all_input_nodes):
            last.add(node)
    return first, last


def _arrived(node: fx.Node) -> bool:
    read = node.args[0] if node.target is operator.getitem else None
    return isinstance(read, fx.Node) and read.target is receive


def _made(node: fx.Node) -> bool:
    read = node.args[0] if node.target is operator.getitem else None
    return isinstance(read, fx.Node) and read.op == "call_module"


def _late(plain: list[fx.Node]) -> set[fx.Node]:
    """The nodes that their readers are to compute, so that the fewest bytes are carried: the far
    side of a minimum cut. One that does not make a tensor stays with those who read it."""
    candidates = set(plain)
    first, last = _pinned(plain, candidates)
    # A value hangs on its "carried" node, and that on its readers: however many of them are on the
    # far side, its bytes are cut, and so counted, once. Edges without a capacity are never cut.
    # The graph of the cut, for a plain node q that reads a value a of a call, and is read by
    # another:
    #
    #     maker --> (carried a) --> q --> (carried q) --> reader      capacities: bytes of a, of q
    #                               q <-- who reads q                 what reads a late node is late
    #
    # q on the maker's side cuts the second edge, so q is carried; on the reader's side the first.
    cut = nx.DiGraph()
    cut.add_nodes_from(["maker", "reader"])
    call_results = dict.fromkeys(s for node in plain for s in node.all_input_nodes if _made(s))
    readers = _readers(plain)
    for value in (*call_results, *plain):
        name, carried = ("maker" if value in call_results else value), ("carried", value)
        whole = not isinstance(value.meta.get("val"), torch.Tensor)
        later = {call for user in candidates.intersection(value.users) for call in readers[user]}
        if value in candidates or later.isdisjoint(value.users):  # else it goes there in any case
            cut.add_edge(name, carried, capacity=max(1, node_bytes(value)))
            for user in value.users:
                if value in candidates or user in candidates:
                    cut.add_edge(carried, user if user in candidates else "reader")
        for user in candidates.intersection(value.users) if value in candidates else ():
            cut.add_edge(user, value)  # what reads a late node is late
            # a number or a tuple cannot be carried, so it goes where its readers go
            if whole:
                cut.add_edge(value, user)
    for node in plain:
        if node in first:
            cut.add_edge("maker", node)
        if node in last:
            cut.add_edge(node, "reader")
    # Of several smallest cuts networkx gives the one with the fewest nodes on the far side, so what
    # makes no difference stays with its maker.
    _, (_, late) = nx.minimum_cut(cut, "maker", "reader")
    return candidates & late


def _readers(plain: list[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """The calls that read a plain node, by themselves or through others."""
    readers: dict[fx.Node, set[fx.Node]] = {}
    for node in reversed(plain):
        readers[node] = {user for user in node.users if user.op == "call_module"}
        readers[node].update(*(readers.get(user, ()) for user in node.users))
    return readers


class _Absorber:
    def __init__(self, program: ProgramBase):
        self.program, self.nodes = program, list(program.module.graph.nodes)
        self.plain = _read(plain_nodes(program))
        # Nodes that nobody reads are left out first: they would hold others on their side.
        self.late = _late(self.plain)
        self.maker = self._makers()  # the call that makes a value, or what is not late
        calls = [node for node in self.nodes if node.op == "call_module"]
        self.before = {call: self._needed(call) for call in calls}
        self.after: dict[fx.Node, list[fx.Node]] = {call: [] for call in calls}
        for node in self.plain:
            if node not in self.late:
                self.after[self.maker[node]].append(node)
        # What leaves the body that makes it: a body that absorbs gives nothing else.
        readers = [node for node in self.nodes if node.op == "output" or node.target is send]
        self.carried = {source for node in readers for source in node.all_input_nodes}
        self.carried.update(source for call in calls for source in self._arguments(call))

    def _makers(self) -> dict[fx.Node, fx.Node]:
        place = {node: index for index, node in enumerate(self.nodes)}
        own = set(self.plain) - self.late
        makers: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            if _made(node):
                makers[node] = node.all_input_nodes[0]
            elif node in own:
                # The last of the calls that make what it reads: only behind it is all of that
                # there.
                calls = [makers[source] for source in node.all_input_nodes if source in makers]
                makers[node] = max(calls, key=place.__getitem__)
        return makers

    def _needed(self, call: fx.Node) -> list[fx.Node]:
        """The late nodes that a call computes before all else, in their order."""
        wanted: set[fx.Node] = set()
        pending = list(call.all_input_nodes)
        while pending:
            node = pending.pop()
            if node in self.late and node not in wanted:
                wanted.add(node)
                pending += node.all_input_nodes
        return [node for node in self.plain if node in wanted]

    def _arguments(self, call: fx.Node) -> list[fx.Node]:
        """What a call is given, all that it absorbs included, each value once."""
        members = [call, *self.before[call], *self.after[call]]
        reads = dict.fromkeys(source for node in members for source in node.all_input_nodes)
        inside = set(members)
        return [s for s in reads if s not in inside and self.maker.get(s) is not call]

    def build(self) -> fx.GraphModule:
        copy = Copy(self.program.module)
        plain = set(plain_nodes(self.program))
        for node in self.nodes:
            if node.op == "call_module" and (self.before[node] or self.after[node]):
                self._call(node, copy)
            elif node not in plain and node not in copy.here:
                copy.keep(node)
        return copy.module("GraphModule")

    def _call(self, node: fx.Node, copy: Copy) -> None:
        """A call of another body, and its results, of which others read the old ones."""
        made = [value for value, maker in self.maker.items() if maker is node]
        values = [value for value in made if value in self.carried]
        arguments = self._arguments(node)
        # Calls may share a body, but not what they absorb: so this one has the call's name.
        copy.held[node.name] = self._body(node, arguments, values)
        read = copy.read(tuple(arguments))
        call = copy.graph.create_node("call_module", node.name, read, name=node.name)
        call.meta = dict(node.meta)
        for index, value in enumerate(values):
            copy.here[value] = copy.part(call, index, value)
        for value in made:  # what its own body alone reads has nothing that stands for it
            copy.here.setdefault(value, None)

    def _body(
        self, call: fx.Node, arguments: Sequence[fx.Node], values: Sequence[fx.Node]
    ) -> fx.GraphModule:
        """A call's body with all that it absorbs: so many arguments in, these values out."""
        old = self.program.module.get_submodule(str(call.target))
        assert isinstance(old, fx.GraphModule)
        body = Copy(old)
        for argument in arguments:
            body.input(argument)
        for node in self.before[call]:
            body.keep(node)
        #     before (late nodes)      of what arrives, what the old body reads
        #     the old body             with their results in the place of its inputs
        #     after (nodes of its own) of its results, what is carried further
        results = body.inline(old, body.read(call.args))
        for part in call.users:
            body.here[part] = results[part.args[1]]
        for node in self.after[call]:
            body.keep(node)
        body.graph.output(body.read(tuple(values)))
        return body.module(call.name)


def _read(plain: list[fx.Node]) -> list[fx.Node]:
    """Those that somebody reads, in their order."""
    read: set[fx.Node] = set()
    candidates = set(plain)
    for node in reversed(plain):
        if any(user in read or user not in candidates for user in node.users):
            read.add(node)
    return [node for node in plain if node in read]
