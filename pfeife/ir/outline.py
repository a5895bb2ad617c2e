"""Outlining and its inverse: a flat graph into a graph of calls, and back.

`fuse`, `partition` and `split_backward` all decide which call a node belongs to; this module
does the rest: `inline` gives the flat graph and who owns each node, `outline` builds bodies.
"""

import functools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import attrs
import torch
from torch import fx

from pfeife.ir.editing.absorb import absorb
from pfeife.ir.editing.copying import Copy, copied, copied_part
from pfeife.ir.members import arrived
from pfeife.ir.nodes import attribute, is_number, is_source, receive, returned, send, source_line
from pfeife.ir.parts import STATE_ROLES, AProgram, Call, Kind, ProgramBase, Role


class Group(NamedTuple):
    """The call that a node belongs to: of which cluster or stage, and which part of it."""

    unit: int
    kind: Kind

    @property
    def order(self) -> tuple[int, int, int]:
        """Forwards from first to last, then backwards from last to first, I before W."""
        if self.kind == Kind.FORWARD:
            return (0, self.unit, 0)
        return (1, -self.unit, int(self.kind == Kind.WEIGHT_BACKWARD))

    def __str__(self) -> str:
        return f"{self.unit}{self.kind}"


KIND_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_BACKWARD: "input_backward",
    Kind.WEIGHT_BACKWARD: "weight_backward",
}


def inline(program: AProgram) -> tuple[AProgram, dict[str, Group]]:
    """The flat program, and the group of every node that a call computed.

    Node names are kept where they are unique. A flat program comes back as an equal copy.
    """
    program = absorb(program)
    calls = {call.node: call for call in program.calls}
    groups: dict[str, Group] = {}

    def inlined(node: fx.Node, copy: Copy) -> Any:
        read = [copy.here[source] for source in node.all_input_nodes]
        if node.op == "call_module":
            call = calls[node.name]
            body = program.body(call)
            # A body that two calls share is copied twice; `copy.here` has the nodes of the last
            # copy, so their groups are noted before the next call.
            results = copy.inline(body, copy.read(node.args))
            computing = (inner for inner in body.graph.nodes if inner.op.startswith("call"))
            groups.update({copy.here[n].name: Group(call.unit, call.kind) for n in computing})
            return results
        if node.target is operator.getitem and isinstance(read[0], tuple):
            return read[0][node.args[1]]  # type: ignore[index]
        if node.target is receive:
            return read[0]
        return tuple(read) if node.target is send else None

    module = copied(program.module, inlined).module()
    return attrs.evolve(program, module=module, calls=(), reductions=()), groups


def outline(
    flat: AProgram,
    groups: Mapping[str, Group],
    duplicates: Collection[str] = (),
    word: str = "stage",
) -> AProgram:
    """Gathers the nodes of each group into one body and calls it.

        flat:      x, w -> a1 -> a2 -> b1 -> loss    with a1, a2 in group A and b1 in group B
        outlined:  A(x, w) -> (a2,)    B(a2) -> (loss,)

    A body's arguments are what its nodes read from elsewhere, its results what others read.
    `groups` names the group of every computing node. The nodes named in `duplicates` get no
    group, and neither do numbers: every body that reads one computes it for itself. Raises
    ValueError when a group reads what a later one computes (forwards run in ascending, backwards in
    descending order).
    """
    module, calls = _Outliner(flat, groups, duplicates, word).build()
    return attrs.evolve(flat, module=module, calls=calls, reductions=())


class _Outliner:
    def __init__(
        self, flat: ProgramBase, groups: Mapping[str, Group], duplicates: Collection[str], word: str
    ):
        self.flat, self.word = flat, word
        self.nodes = [node for node in flat.module.graph.nodes if node.op != "output"]
        self.results = returned(flat.module)
        # Somebody has to own what the program returns, so that one rank hands it out.
        exported = {node.name for node in self.results.values()}
        # Who computes what, for groups A and B and a node v named as a duplicate:
        #
        #     x -> a -> v -> b       a in A, b in B, v in neither (free): both bodies may have it
        #     A(x) -> (a,)           v is a member where it is read, not where it was written
        #     B(a) -> (b,)           B computes v of a for itself; of A it reads a alone
        self.free = {
            node
            for node in self.nodes
            if not is_source(node)
            and (node.name in duplicates or is_number(node))
            and node.name not in exported
        }
        self.free -= {  # parts of a tuple stay with their maker
            node
            for node in self.free
            if node.target is operator.getitem and node.all_input_nodes[0] not in self.free
        }
        # Graphs that operations such as a checkpoint call cannot travel: each body has its own.
        self.subgraphs = {
            node
            for node in self.nodes
            if node.op == "get_attr"
            and isinstance(attribute(flat.module, node.target), torch.nn.Module)
        }
        self.group: dict[fx.Node, Group] = {}
        for node in self.nodes:
            if not is_source(node) and node not in self.free:
                group = groups.get(node.name)
                if node.target is operator.getitem:  # parts of a tuple stay with their maker
                    group = self.group.get(node.all_input_nodes[0], group)
                if group is None:
                    raise ValueError(f"node {node.name} belongs to no group")
                self.group[node] = group
        self.members: dict[Group, dict[fx.Node, None]] = {}
        self.reads: dict[Group, dict[fx.Node, None]] = {}
        for node in self.nodes:
            if node in self.group:
                self._need(self.group[node], node)

    def _need(self, group: Group, node: fx.Node) -> None:
        """Puts a node into a group's body, and what it reads from elsewhere into the reads. What
        nobody owns comes along, first, so that the members stay in an order in which they run."""
        members = self.members.setdefault(group, {})
        # dicts rather than sets, whose order is another one in every process: arguments and results
        # go by it
        reads = self.reads.setdefault(group, {})
        for source in node.all_input_nodes:
            if source in self.free or source in self.subgraphs:
                if source not in members:
                    self._need(group, source)
            elif self.group.get(source) != group:
                reads[source] = None
        members[node] = None

    def build(self) -> tuple[fx.GraphModule, tuple[Call, ...]]:
        """The graph of calls, with the bodies in it."""
        copy = Copy(self.flat.module)
        for node in self.nodes:
            if is_source(node) and node not in self.subgraphs:
                copy.keep(node)
        wanted = set(self.results.values()).union(*self.reads.values())
        calls = []
        for group in self._ordered():
            # A duplicate is a member of several bodies and the result of none.
            members = self.members[group]
            results = [n for n in members if n in wanted and self.group.get(n) == group]
            if not results:
                continue  # nothing reads it
            name = f"{self.word}_{group.unit}_{KIND_WORDS[group.kind]}"
            reads = tuple(self.reads[group])
            copy.held[name] = copied_part(self.flat.module, reads, members, results, name)
            call = copy.graph.create_node("call_module", name, copy.read(reads), name=name)
            calls.append(Call(call.name, group.kind, group.unit))
            # Values keep their names: ports, plans and later passes go by them.
            for index, node in enumerate(results):
                copy.here[node] = copy.part(call, index, node)
        copy.graph.output(copy.read(self.results))
        return copy.module("GraphModule"), tuple(calls)

    def _ordered(self) -> list[Group]:
        for group, reads in self.reads.items():
            for node in reads:
                source = self.group.get(node)
                # A read from a later group would make a circle of calls: no order of them would
                # run.
                if source is not None and source.order > group.order:
                    raise ValueError(
                        f"{group} reads {node.name}, which {source} computes later "
                        f"({source_line(node)}); number the {self.word}s so that values flow to "
                        "the same or a later forward, gradients to the same or an earlier backward"
                    )
        return sorted(self.members, key=lambda group: group.order)


# Their schemas promise fresh tensors, their kernels look at the input's storage.
_SILENT_VIEWS = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
}


def is_view(node: fx.Node) -> bool:
    """Whether a node only looks at its input's storage in another way."""
    return not isinstance(node.target, str) and _looks(node.target)


@functools.lru_cache(maxsize=4096)
def _looks(operation: Callable[..., Any]) -> bool:
    """Whether an operation gives a view; to ask its schema takes long."""
    schema = getattr(operation, "_schema", None)
    if operation is arrived:
        return True
    if schema is None or len(schema.returns) != 1:
        return False
    if operation in _SILENT_VIEWS:
        return True
    returned = schema.returns[0].alias_info
    return returned is not None and not returned.is_write


def viewed(node: fx.Node) -> fx.Node:
    """The node whose storage a chain of views looks at; the node itself if it is no view."""
    # A view has its input first: what else it reads are sizes.
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def storage_owner(node: fx.Node) -> fx.Node:
    """The node that made the storage of a value: as `viewed`, and seen through the parts of
    operations that return several views."""
    base = viewed(node)
    if base.target is operator.getitem and is_view(base.all_input_nodes[0]):
        return storage_owner(base.all_input_nodes[0])
    return base


def read_by_backwards(program: ProgramBase) -> frozenset[str]:
    """The input ports whose storage the backward calls of a program read: by themselves, or as
    views of them that forwards hand over."""
    flat, groups = inline(program)
    roles = (*STATE_ROLES, Role.BATCH)
    names = {port.name for port in program.ports(*roles)}
    # flat, so that a view which a forward hands over is a node like others, to be seen through
    later = [
        node
        for node in flat.module.graph.nodes
        if node.name in groups and groups[node.name].kind != Kind.FORWARD
    ]
    read = {storage_owner(source).name for node in later for source in node.all_input_nodes}
    return frozenset(read & names)


def own_results(body: fx.GraphModule) -> frozenset[int]:
    """The results of a body that may be written to: an operation of torch's own made their storage
    in the body, no other result looks at it, and each of its elements stands there once."""
    # A result that shares storage with another, or with an input, must not be written to: whoever
    # has the other one would see it change.
    owners = [storage_owner(node) for node in returned(body)]
    looked = Counter(owners)
    return frozenset(
        index
        for index, (node, owner) in enumerate(zip(returned(body), owners, strict=True))
        if looked[owner] == 1 and not _is_spread(node) and _is_torchs(owner)
    )


def _is_spread(node: fx.Node) -> bool:
    """Whether an element of a value may stand for several."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or any(
        stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)
    )


def _is_torchs(owner: fx.Node) -> bool:
    """Whether torch's own operation has made a value: others may hide views."""
    maker = owner.all_input_nodes[0] if owner.target is operator.getitem else owner
    return getattr(maker.target, "namespace", "") in ("aten", "prims")
