"""The graph of one member of a group, of a flat one of whole values."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import fx

from pfeife._torch.attention import in_order
from pfeife.factors.equation import Chosen, Equation, Label, Place, tensors_of
from pfeife.factors.experts import Owners
from pfeife.factors.moves import SUM, Where, move_of
from pfeife.factors.recipes import Part
from pfeife.factors.way import Way, limits
from pfeife.factors.ways import Ways
from pfeife.ir.editing.copying import Copy
from pfeife.ir.editing.infer_values import settle
from pfeife.ir.members import added_rows, fetched_rows, joined_rows, part
from pfeife.ir.nodes import (
    bound,
    is_source,
    operation_name,
    returned,
    unknown_sizes_of,
    value_of,
)
from pfeife.ir.parts import Port, Role
from pfeife.ir.program import Program
from pfeife.ir.seeding import seeded
from pfeife.ir.split import Split
from pfeife.passes.member_arguments import localised, named, own_and_whole, squeezed
from pfeife.passes.member_layouts import (
    back,
    check_whole,
    lies_in_order,
    order_in_memory,
    order_of,
)

aten = torch.ops.aten
_TOLD = ("val", "sizes", "tensor_meta")  # of a whole value: a member's own is told anew
# They read memory as it lies there, as draws do, and the backward of a decomposed matrix; products
# lay out their results in one way alone, and views have the order of what they see, as what is
# computed number by number.
_BY_LAYOUT = ("as_strided", "as_strided_copy", "as_strided_scatter")
_ALIGNED = ("_grouped_mm",)  # takes a matrix whose rows or columns are aligned
_IN_ORDER = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "grouped_mm_fallback")
_SEEN = (
    *("t", "transpose", "permute", "unsqueeze", "squeeze", "expand", "alias", "detach"),
    *("split", "slice", "cat"),
)


class Member:
    """The graph of one member, node by node, each computed in its way.

        whole graph     w[8, 4] -> t[4, 8] ----> mm[2, 8] -> relu -> mm[2, 4] -> add
        places          0          1             1           1       SUM
        copies          w[4, 4]    t[4, 4]       mm[2, 4]    relu    mm, all_reduce

    `places` has where each node of the whole graph is here (None: all members have the same), a
    tuple of these for several results; `copies` has what stands for it, by that place, so that what
    a value is made into is made once. `items` are the results that are nodes by themselves. Values
    that were put together of parts may be `laid_out` otherwise than on one device, and so what is
    computed of them.
    """

    def __init__(
        self,
        whole: Program,
        splits: Mapping[str, Split],
        chosen: Mapping[fx.Node, Way],
        ways: Ways,
    ):
        self.whole, self.splits, self.ways, self.members = whole, splits, chosen, ways.members
        self.owners_of, self.owners = ways.owners_of, ways.owners
        self.has_no_rule = ways.has_no_rule
        self.starts: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        self.copy = Copy(whole.module)
        self.places: dict[fx.Node, Any] = {}
        self.copies: dict[tuple[fx.Node, Any], fx.Node] = {}
        self.items: dict[fx.Node, Sequence[fx.Node]] = {}
        self.laid_out: set[fx.Node] = set()

    def program(self) -> Program:
        """The program of a member."""
        ports, partial = {port.name: port for port in self.whole.inputs}, frozenset[str]()
        for node in self._in_turn():
            if node.op == "placeholder":
                self._input(node, ports[node.name])
            elif node.op == "output":
                partial = self._partial()
                self.copy.graph.output(self._results(partial))
            elif is_source(node):
                self._stands(node, self.copy.keep(node), None)
            else:
                self._compute(node)
        return settle(
            attrs.evolve(
                self.whole,
                limits=tuple(dict.fromkeys((*self.whole.limits, *limits(self.ways, self.members)))),
                module=self.copy.module(),
                inputs=tuple(map(self._port, self.whole.inputs)),
                outputs=tuple(
                    attrs.evolve(self._port(port), partial=port.name in partial)
                    for port in self.whole.outputs
                ),
                members=self.members,
            )
        )

    def _in_turn(self) -> Iterator[fx.Node]:
        """All nodes, in the order of the graph, but that which rows are whose is computed before
        what a member has of them."""
        done: set[fx.Node] = set()
        todo = [*reversed(self.whole.module.graph.nodes)]
        while todo:
            node = todo[-1]
            way = self.ways.get(node)
            owners = self.owners_of(node) if way is not None and way.by_data else None
            needed = [*node.all_input_nodes, *([owners.offsets] if owners else [])]
            missing = [need for need in needed if need not in done]
            todo += missing
            if not missing:
                if todo.pop() not in done:
                    yield node
                done.add(node)

    def _split_of(self, port: Port) -> Split | None:
        """How a port is cut: a parameter, and its gradient alike."""
        cut = port.role in (Role.PARAMETER, Role.GRADIENT)
        return self.splits.get(port.fqn) if cut else None

    def _port(self, port: Port) -> Port:
        split = self._split_of(port)
        return attrs.evolve(port, shape=split.local(port.shape), split=split) if split else port

    def _partial(self) -> frozenset[str]:
        """The ports of gradients of which members have addends: they are added up once a step, and
        not in each microbatch. Those of a sparse one are not of one shape."""
        nodes = returned(self.whole.module)
        whole = (port for port in self.whole.ports(Role.GRADIENT) if port.fqn not in self.splits)
        sums = (port.name for port in whole if self.places[nodes[port.name]] == SUM)
        return frozenset(name for name in sums if nodes[name].meta["val"].layout == torch.strided)

    def _stands(self, node: fx.Node, copy: fx.Node, place: Any) -> None:
        self.places[node] = place
        self.copies[node, place] = copy
        if isinstance(place, Chosen):
            self._choose(copy)

    def _choose(self, copy: fx.Node) -> fx.Node:
        """Says of a value that data decide how many rows a member has of it."""
        copy.meta |= {"sized_by_data": True, "sharers": self.members}
        return copy

    def _input(self, node: fx.Node, port: Port) -> None:
        copy, split, value = self.copy.keep(node), self._split_of(port), value_of(node)
        if split is None or value is None:
            self._stands(node, copy, None)
            return
        with value.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
            copy.meta["val"] = value.new_empty(split.local(value.shape))
        self._stands(node, copy, Place(split.dim, split.before))

    def _results(self, partial: frozenset[str]) -> dict[str, fx.Node]:
        nodes, results = returned(self.whole.module), {}
        for port in self.whole.outputs:
            split = self._split_of(port)
            wanted: Where = Place(split.dim, split.before) if split else None
            if port.name in partial:
                wanted = SUM
            results[port.name] = self._at(nodes[port.name], wanted)
        return results

    def _compute(self, node: fx.Node) -> None:
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and isinstance(self.places.get(source), tuple):
            self._item(node, source)
        elif node.target is seeded and self.ways[node].cut:
            self._drop_out(node)
        elif self.ways[node].exchange:
            self._exchange(node, self.ways[node])
        else:
            self._in_its_way(node)

    def _item(self, node: fx.Node, source: fx.Node) -> None:
        """One of several results."""
        places, index = self.places[source], node.args[1]
        if source in self.laid_out:
            self.laid_out.add(node)
        if source in self.items:
            copy = self.items[source][index]  # type: ignore[index]
        else:
            copy = self._make(node, operator.getitem, self.copies[source, places], index)
        self._stands(node, copy, places[index])

    def _exchange(self, node: fx.Node, way: Way) -> None:
        """Rows that an index says, from those who have them to those who read them."""
        reads, (there,) = tensors_of(node), way.results
        owners = self.owners_of(node)
        assert owners is not None
        starts, _ = self._starts(node, owners)
        index, here = self._at(reads[1], None), way.operands[0 if len(reads) == 2 else -1]
        cuts = [starts if isinstance(place, Chosen) else None for place in (here, there)]
        value = self._at(reads[0 if len(reads) == 2 else -1], here, owners)
        if len(reads) == 2:
            copy = self._make(node, fetched_rows, value, index, *cuts, self.members)
        else:
            into = self._at(reads[0], there, owners)
            copy = self._make(node, added_rows, value, into, index, *cuts, self.members)
        if not lies_in_order(node):
            self.laid_out.add(node)
        self._stands(node, copy, there)

    def _starts(self, like: fx.Node, owners: Owners) -> tuple[fx.Node, fx.Node]:
        """Where each member's rows start, and the offsets of its own experts."""
        if owners.offsets not in self.starts:
            offsets = self._at(owners.offsets, None)
            make = partial(self._make, like)
            self.starts[owners.offsets] = owners.starts(make, offsets, self.members)
        return self.starts[owners.offsets]

    def _of_own_experts(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments with the offsets of a member's own experts."""
        owners = self.owners_of(node)
        assert owners is not None
        own = {**named(node, args, kwargs), "offs": self._starts(node, owners)[1]}
        return in_order(node.target, own)

    def _in_its_way(self, node: fx.Node) -> None:
        reads, way, name = tensors_of(node), self.ways[node], operation_name(node)
        owners = self.owners_of(node) if way.by_data else None
        unknown = self.has_no_rule(node)
        decomposes = name.startswith("_linalg_")
        by_layout = name in _BY_LAYOUT or node.target is seeded or decomposes
        if by_layout or unknown or name in _ALIGNED:
            # What is scattered into another one's memory is read by its elements.
            layouts = reads[:1] if name in _BY_LAYOUT else reads
            for read, place in zip(layouts, way.operands, strict=False):
                self._at(read, place, owners)  # which may put it in another order
                if read in self.laid_out and by_layout:
                    check_whole(read, node)
                if read in self.laid_out:
                    self._lay_out(read, place, owners)
        wanted, tensors = iter(way.operands), {*reads}
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs),
            lambda read: self._at(read, next(wanted) if read in tensors else None, owners),
        )
        if way.equation is not None and way.label is not None:
            self._cut(node, way.equation, way.label, way.results, args, kwargs)
            return
        if not self.laid_out.isdisjoint(reads):
            self.laid_out.add(node)
        result = self._make(node, node.target, *args, **kwargs)
        several = isinstance(node.meta.get("val"), tuple | list)
        if not way.cut:
            result.meta = dict(node.meta)
        self._stands(node, result, way.results if several else way.results[0])

    def _lay_out(self, node: fx.Node, place: Where, owners: Owners | None) -> None:
        """Lays out a value, or a part of it, with its dimensions in the order that they have in
        memory on one device."""
        order = order_in_memory(node)
        seen = self._make(node, aten.permute.default, self._at(node, place, owners), order)
        made = self._make(node, aten.clone.default, seen, memory_format=torch.contiguous_format)
        copy = self._make(node, aten.permute.default, made, back(order))
        for each in (seen, made, copy) if isinstance(place, Chosen) else ():
            self._choose(each)
        self.copies[self._key(node, place, owners)] = copy
        if place is None:
            self.laid_out.discard(node)
            self._is_whole(copy, node)

    def _is_whole(self, copy: fx.Node, node: fx.Node) -> None:
        """Says of what is put together that it is a value again: of what is computed of it data may
        decide the size, which nobody can tell."""
        copy.meta |= {name: node.meta[name] for name in _TOLD if name in node.meta}

    def _drop_out(self, node: fx.Node) -> None:
        """A dropout of a value that is cut: each member draws for the whole of it, as one device
        does, whose draws are in the order of its memory, and keeps its part.

            mask = native_dropout(ones)[1]      x * part(mask) * 1 / (1 - p), as the kernel does
        """
        operation, index, seed, value, p, *args = node.args
        place = self.ways[node].results[0]
        assert (
            isinstance(value, fx.Node) and isinstance(p, float | int) and isinstance(place, Place)
        )
        x = self._at(value, place)
        sizes, order = self._whole_sizes(value, x, place), order_of(node.meta["val"][1])
        ones = self._make(node, aten.new_ones.default, x, [sizes[dim] for dim in order])
        ones = self._make(node, aten.permute.default, ones, back(order))
        draws = self._make(node, seeded, operation, index, self._at(seed, None), ones, p, *args)  # type: ignore[arg-type]
        mask = self._make(node, operator.getitem, draws, 1)
        mask = self._make(node, part, mask, *attrs.astuple(place), self.members)
        kept = self._make(node, aten.mul.Tensor, x, mask)
        scaled = self._make(node, aten.mul.Scalar, kept, 1 / (1 - p))
        self.places[node], self.items[node] = (place, place), (scaled, mask)
        if value in self.laid_out or not lies_in_order(value):
            self.laid_out.add(node)

    def _whole_sizes(self, node: fx.Node, copy: fx.Node, place: Place) -> list[Any]:
        """Those of a value of which a member has a part; of open ones, by what it has."""
        sizes: list[Any] = [*unknown_sizes_of(node)]
        for dim, size in enumerate(sizes):
            if not isinstance(size, int):
                own = self._make(node, aten.sym_size.int, copy, dim)
                is_cut = dim == place.dim
                sizes[dim] = self._make(node, operator.mul, own, self.members) if is_cut else own
        return sizes

    def _cut(
        self,
        node: fx.Node,
        equation: Equation,
        label: Label,
        places: tuple[Where, ...],
        args: Any,
        kwargs: Any,
    ) -> None:
        """A node on a member's part of a factor."""
        name, reads = operation_name(node), tensors_of(node)
        by_number = torch.Tag.pointwise in getattr(node.target, "tags", ())
        is_seen = (name in _SEEN or by_number) and self.laid_out.isdisjoint(reads)
        if not is_seen and not (name in _IN_ORDER and lies_in_order(node)):
            self.laid_out.add(node)
        several = isinstance(node.meta.get("val"), tuple | list)
        if label in equation.recipes:
            made = self._by_recipe(node, equation, label, args, kwargs)
            if several:
                self.places[node], self.items[node] = places, made
            else:
                self._stands(node, made, places[0])
            return
        make = partial(self._make, node)
        args, kwargs = localised(make, node, equation, label, self.members, args, kwargs)
        if equation.owned and label in equation.owned.values():
            args, kwargs = self._of_own_experts(node, args, kwargs)
        target: Any = node.target
        if name == "squeeze":
            target, args = aten.squeeze.dims, (args[0], squeezed(node))
        own = make(target, *args, **kwargs)
        if equation.averages and places[0] == SUM:
            own = self._make(node, aten.div.Scalar, own, self.members)
        self._stands(node, own, places if several else places[0])

    def _by_recipe(
        self, node: fx.Node, equation: Equation, label: Label, args: Any, kwargs: Any
    ) -> Any:
        """A node along a dimension of which it needs all, by collectives."""
        value, make = node.meta["val"], partial(self._make, node)
        first = value[0] if isinstance(value, tuple | list) else value
        arguments = {**bound(node), **named(node, args, kwargs)}
        sizes = own_and_whole(make, node, equation, label, self.members, arguments)
        reads = tensors_of(node)[0].meta["val"].dtype
        own = Part(arguments, *sizes, self.members, first.dtype, first.device, reads)
        return equation.recipes[label](make, own)

    def _at(self, node: fx.Node, place: Where, owners: Owners | None = None) -> fx.Node:
        """A value where it is wanted; rows that data choose are those of some owners."""
        now, key = self.places[node], self._key(node, place, owners)
        if key not in self.copies:
            # Parts are joined in the order of dimensions, and ranks may add up sums in it.
            if not lies_in_order(node):
                self.laid_out.add(node)
            elif place is None and isinstance(now, Place | Chosen):
                self.laid_out.discard(node)
            copy = self._moved(node, now, place, owners or self.owners.get(node))
            if place is None and lies_in_order(node):
                self._is_whole(copy, node)
            self.copies[key] = self._choose(copy) if isinstance(place, Chosen) else copy
        return self.copies[key]

    def _key(self, node: fx.Node, place: Where, owners: Owners | None) -> tuple[fx.Node, Any]:
        """Of a value at a place: what all have may be cut for several owners."""
        is_cut = isinstance(place, Chosen) and self.places[node] != place
        return node, (place, owners) if is_cut else place

    def _moved(self, node: fx.Node, now: Where, place: Where, owners: Owners | None) -> fx.Node:
        """A value that is brought from where it is to where it is wanted."""
        move, source = move_of(now, place), self.copies[node, now]
        numbers: list[Any] = []
        for end in (now, place):
            numbers += attrs.astuple(end) if isinstance(end, Place | Chosen) else ()
        if Chosen in (type(now), type(place)) and move is not joined_rows:
            assert owners is not None
            numbers.insert(0, self._starts(node, owners)[0])
        return self._make(node, move, source, *numbers, self.members)

    def _make(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node of the same line of the model as another one."""
        node = self.copy.graph.call_function(target, args, kwargs)
        node.meta = {name: value for name, value in like.meta.items() if name not in _TOLD}
        return node
