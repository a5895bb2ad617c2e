"""The graph of one member of a group, of a flat one of whole values."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from pfeife.factors.equation import Equation, Label, NoRule, Place
from pfeife.factors.recipes import Part
from pfeife.factors.rules import equation_of
from pfeife.ir.copying import Copy
from pfeife.ir.infer_values import settle
from pfeife.ir.members import Split, all_gather, all_reduce, all_to_all, part
from pfeife.ir.nodes import bound, is_source, operation_name, returned, source_line, value_of
from pfeife.ir.parts import Port, Role
from pfeife.ir.program import Program
from pfeife.ir.seeding import seeded

aten = torch.ops.aten
_TOLD = ("val", "sizes", "tensor_meta")  # of a whole value: a member's own is told anew
# They read memory as it lies there; products lay out their results in one way alone.
_BY_LAYOUT = ("as_strided", "as_strided_copy", "as_strided_scatter")
_IN_ORDER = ("mm", "addmm", "bmm", "baddbmm")
_REDUCED_TWICE = 2  # an all_reduce sends twice the bytes that an all_gather of as many does


@attrs.frozen
class _Choice:
    """Along which factor of which equation a node is computed (None: as a whole), where its
    operands are for that, and how many bytes are sent."""

    operands: tuple[Place | None, ...]
    bytes: float
    equation: Equation | None = None
    label: Label | None = None


class Member:
    """The graph of one member, node by node: each operation along the factor for which the fewest
    bytes are sent.

        whole graph     w[8, 4] -> t[4, 8] ----> mm[2, 8] -> relu -> mm[2, 4] -> add
        places          0          1             1           1       None
        copies          w[4, 4]    t[4, 4]       mm[2, 4]    relu    mm, all_reduce

    `places` has where each node of the whole graph is cut here (None: all members have the same),
    a tuple of these for several results; `copies` has what stands for it, by that place, so that
    what a value is made into is made once. Of several results `sums` are those of which a member
    has a part, and `nodes` those that are nodes by themselves. Values that were put together of
    parts may be `laid_out` otherwise than on one device, and so what is computed of them.
    """

    def __init__(self, whole: Program, splits: Mapping[str, Split], members: int, gathers: bool):
        self.whole, self.splits, self.members, self.gathers = whole, splits, members, gathers
        self.copy = Copy(whole.module)
        self.places: dict[fx.Node, Any] = {}
        self.copies: dict[tuple[fx.Node, Any], fx.Node] = {}
        self.sums: dict[fx.Node, set[int]] = {}
        self.nodes: dict[fx.Node, Sequence[fx.Node]] = {}
        self.laid_out: set[fx.Node] = set()

    def program(self) -> Program:
        """The program of a member."""
        ports = {port.name: port for port in self.whole.inputs}
        for node in self.whole.module.graph.nodes:
            if node.op == "placeholder":
                self._input(node, ports[node.name])
            elif node.op == "output":
                self.copy.graph.output(self._results())
            elif is_source(node):
                self._stands(node, self.copy.keep(node), None)
            else:
                self._compute(node)
        return settle(
            attrs.evolve(
                self.whole,
                module=self.copy.module(),
                inputs=tuple(map(self._port, self.whole.inputs)),
                outputs=tuple(map(self._port, self.whole.outputs)),
                members=self.members,
            )
        )

    def _split_of(self, port: Port) -> Split | None:
        """How a port is cut: a parameter, and its gradient alike."""
        cut = port.role in (Role.PARAMETER, Role.GRADIENT)
        return self.splits.get(port.fqn) if cut else None

    def _port(self, port: Port) -> Port:
        split = self._split_of(port)
        return attrs.evolve(port, shape=split.local(port.shape), split=split) if split else port

    def _stands(self, node: fx.Node, copy: fx.Node, place: Any) -> None:
        self.places[node] = place
        self.copies[node, place] = copy

    def _input(self, node: fx.Node, port: Port) -> None:
        copy, split, value = self.copy.keep(node), self._split_of(port), value_of(node)
        if split is None or value is None:
            self._stands(node, copy, None)
            return
        with value.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
            copy.meta["val"] = value.new_empty(split.local(value.shape))
        self._stands(node, copy, Place(split.dim, split.before))

    def _results(self) -> dict[str, fx.Node]:
        nodes, results = returned(self.whole.module), {}
        for port in self.whole.outputs:
            split = self._split_of(port)
            wanted = Place(split.dim, split.before) if split else None
            results[port.name] = self._at(nodes[port.name], wanted)
        return results

    def _compute(self, node: fx.Node) -> None:
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and isinstance(self.places.get(source), tuple):
            self._item(node, source)
        elif node.target is not seeded or not self._dropped_out(node):
            self._by_choice(node)

    def _item(self, node: fx.Node, source: fx.Node) -> None:
        """One of several results, of a member's part: a sum's parts are added."""
        places, index = self.places[source], node.args[1]
        if source in self.nodes:
            copy = self.nodes[source][index]  # type: ignore[index]
        else:
            copy = self._make(node, operator.getitem, self.copies[source, places], index)
        if index in self.sums.get(source, ()) or source in self.laid_out:
            self.laid_out.add(node)
        if index in self.sums.get(source, ()):
            copy = self._make(node, all_reduce, copy, self.members)
        self._stands(node, copy, places[index])

    def _by_choice(self, node: fx.Node) -> None:
        reads: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), reads.append)
        choice = self._choice(node, reads)
        places = iter(choice.operands)
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda read: self._at(read, next(places))
        )
        if choice.equation is not None:
            self._cut(node, choice.equation, choice.label, args, kwargs)
            return
        self._check_layout(node, reads)
        whole = self._make(node, node.target, *args, **kwargs)
        whole.meta = dict(node.meta)
        value = node.meta.get("val")
        self._stands(node, whole, (None,) * len(value) if isinstance(value, tuple | list) else None)

    def _check_layout(self, node: fx.Node, reads: Sequence[fx.Node]) -> None:
        """Of what is computed as a whole. Raises ValueError where it would read other elements."""
        if self.laid_out.isdisjoint(reads):
            return
        self.laid_out.add(node)
        if operation_name(node) in _BY_LAYOUT:
            raise ValueError(
                f"shard: {node.target} reads memory as it lies there, and what it reads is put "
                f"together of parts, in another order ({source_line(node)}); leave the parameters "
                "whole that it is computed of"
            )

    def _dropped_out(self, node: fx.Node) -> bool:
        """Whether a node is a dropout of a value that is cut: every member then draws for the whole
        of it, as one device does, and keeps its part.

            mask = native_dropout(ones)[1]      x * part(mask) * 1 / (1 - p), as the kernel does
        """
        operation, index, seed, *args = node.args
        value = args[0] if args else None
        place = self.places.get(value) if isinstance(value, fx.Node) else None
        if operation is not aten.native_dropout.default or place is None or args[1] == 1:
            return False
        x, whole = self.copies[value, place], value_of(value)  # type: ignore[arg-type, index]
        assert whole is not None
        ones = self._make(node, aten.new_ones.default, x, [*whole.shape])
        draws = self._make(node, seeded, operation, index, self._at(seed, None), ones, *args[1:])  # type: ignore[arg-type]
        mask = self._make(node, operator.getitem, draws, 1)
        mask = self._make(node, part, mask, *attrs.astuple(place), self.members)
        kept = self._make(node, aten.mul.Tensor, x, mask)
        scaled = self._make(node, aten.mul.Scalar, kept, 1 / (1 - args[1]))  # type: ignore[operator]
        self.places[node], self.nodes[node] = (place, place), (scaled, mask)
        return True

    def _cut(self, node: fx.Node, equation: Equation, label: Label, args: Any, kwargs: Any) -> None:
        """A node on a member's part of a factor. Parts of sums are added at once."""
        places = tuple(equation.place(dims, label) for dims in equation.results)
        if operation_name(node) not in _IN_ORDER or not _in_order(node):
            self.laid_out.add(node)
        several = isinstance(node.meta.get("val"), tuple | list)
        if label in equation.recipes:
            made = self._by_recipe(node, equation, label, args, kwargs)
            if several:
                self.places[node], self.nodes[node] = places, made
            else:
                self._stands(node, made, places[0])
            return
        args, kwargs = self._localised(node, equation, label, args, kwargs)
        sums = {at for at, summed in enumerate(equation.sums) if label in summed}
        if several:
            self.sums[node] = sums
            self._stands(node, self._make(node, node.target, *args, **kwargs), places)
        elif sums:
            self._stands(node, self._added(node, equation, args, kwargs), None)
        else:
            self._stands(node, self._make(node, node.target, *args, **kwargs), places[0])

    def _added(self, node: fx.Node, equation: Equation, args: Any, kwargs: Any) -> fx.Node:
        """A sum over what is cut, of which a member computes its part."""
        if equation.apart is None:
            own = self._make(node, node.target, *args, **kwargs)
        else:
            own = self._make(node, equation.apart, *args[1:])
        total = self._make(node, all_reduce, own, self.members)
        if equation.averages:
            total = self._make(node, aten.div.Scalar, total, self.members)
        return self._make(node, aten.add.Tensor, args[0], total) if equation.apart else total

    def _by_recipe(
        self, node: fx.Node, equation: Equation, label: Label, args: Any, kwargs: Any
    ) -> Any:
        """A node along a dimension of which it needs all, by collectives."""
        value = node.meta["val"]
        dtype = (value[0] if isinstance(value, tuple | list) else value).dtype
        arguments = {**bound(node), **_named(node, args, kwargs)}
        own = Part(arguments, equation.sizes[label] // self.members, self.members, dtype)
        make = lambda target, *args, **kwargs: self._make(node, target, *args, **kwargs)  # noqa: E731
        return equation.recipes[label](make, own)

    def _localised(
        self, node: fx.Node, equation: Equation, label: Label, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """The arguments, of which some may be sizes of the result: those of a member's part."""
        local: dict[str, Any] = {}
        place = equation.place(equation.results[0], label)
        value = value_of(node)
        if equation.shape is not None and value is not None and place is not None:
            split = Split(place.dim, self.members, place.before)
            local[equation.shape] = [*split.local(value.shape)]
        for name, counted in equation.counts.items():
            size = _named(node, args, kwargs)[name]
            if counted == label:
                many = isinstance(size, list | tuple)
                local[name] = [n // self.members for n in size] if many else size // self.members
        names = _names(node)
        args = tuple(local.get(name, value) for name, value in zip(names, args, strict=False))
        return args, {name: local.get(name, value) for name, value in kwargs.items()}

    def _choice(self, node: fx.Node, reads: Sequence[fx.Node]) -> _Choice:
        """The cut of an operation for which the fewest bytes are sent. Without one, all members do
        all of its work: that is the way only where nothing is cut, or cannot be."""
        whole = _Choice((None,) * len(reads), 0.0)
        if all(self.places[read] is None for read in reads):
            return whole
        try:
            cuts = [*self._cuts(equation_of(node), reads)]
        except NoRule:
            if self.gathers:
                return whole
            raise ValueError(
                f"shard: no rule says how {node.target} is computed on parts "
                f'({source_line(node)}); shard(..., unknown="gather") computes it as a whole'
            ) from None
        return min(cuts, key=lambda cut: cut.bytes, default=whole)

    def _cuts(self, equation: Equation, reads: Sequence[fx.Node]) -> Iterable[_Choice]:
        """The ways along factors that some operand is cut along already."""
        for read, dims in zip(reads, equation.operands, strict=True):
            place = self.places[read]
            found = equation.at(dims, place) if place is not None else None
            if found is None or not found[0].can_cut(found[1], self.members):
                continue
            refined, label = found
            places = tuple(refined.place(operand, label) for operand in refined.operands)
            added = sum(
                math.prod(refined.sizes[factor] for dim in dims for factor in dim)
                for dims, summed in zip(refined.results, refined.sums, strict=True)
                if label in summed or (label in refined.recipes and not refined.place(dims, label))
            )
            moved = self._moved(reads, places) + _REDUCED_TWICE * added * _itemsize(reads)
            yield _Choice(places, moved, refined, label)

    def _moved(self, reads: Sequence[fx.Node], places: Sequence[Place | None]) -> float:
        """The bytes that are sent for operands to be where they are wanted: a gathered value as a
        whole, one that is cut otherwise a member's part of it."""
        moved = 0.0
        for node, place in dict(zip(reads, places, strict=True)).items():
            value, made = value_of(node), (node, place) in self.copies
            if not made and self.places[node] is not None and value is not None:
                share = 1 if place is None else 1 / self.members
                moved += value.numel() * value.dtype.itemsize * share
        return moved

    def _at(self, node: fx.Node, place: Place | None) -> fx.Node:
        """A value where it is wanted."""
        if (node, place) not in self.copies:
            now = self.places[node]
            if place is None:  # parts are joined in the order of dimensions
                (self.laid_out.discard if _in_order(node) else self.laid_out.add)(node)
            collective = part if now is None else all_gather if place is None else all_to_all
            ways = [number for way in (now, place) if way for number in attrs.astuple(way)]
            source = self.copies[node, now]
            self.copies[node, place] = self._make(node, collective, source, *ways, self.members)
        return self.copies[node, place]

    def _make(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node of the same line of the model as another one."""
        node = self.copy.graph.call_function(target, args, kwargs)
        node.meta = {name: value for name, value in like.meta.items() if name not in _TOLD}
        return node


def _in_order(node: fx.Node) -> bool:
    """Whether the elements of a value lie in the order of its dimensions."""
    value = value_of(node)
    return value is not None and value.is_contiguous()


def _itemsize(reads: Iterable[fx.Node]) -> int:
    """Bytes of an element of the first operand."""
    return next(value.dtype.itemsize for value in map(value_of, reads) if value is not None)


def _names(node: fx.Node) -> list[str]:
    """The names of an operation's arguments, in their order."""
    return [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]


def _named(node: fx.Node, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by the names in the operation's schema."""
    return dict(zip(_names(node), args, strict=False)) | kwargs
