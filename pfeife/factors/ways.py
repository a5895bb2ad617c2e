"""In which ways members of a group may compute a program, where parameters are cut.

    w [8, 4] ----> mm ----> relu ----> ...
    0, 1, -       0, 1, -    0, 1, -       the places of a value: a dimension that is cut, or whole

A parameter may be cut along each of its dimensions; from there equations say how everything that is
computed of it may be.
"""

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import fx

from pfeife.factors.equation import Dims, Equation, Label, NoRule, Place
from pfeife.factors.rules import equation_of
from pfeife.ir.nodes import is_source
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.ir.seeding import seeded

SUM = "sum"  # where a value is of which each member has a part of the sum
Where = Place | str | None
_MOST = 8  # places of one value


@attrs.frozen
class Way:
    """How a node is computed: where its operands and results are, and whether each member computes
    its part alone. That of a parameter is where it is."""

    operands: tuple[Where, ...]
    results: tuple[Where, ...]
    cut: bool = True


class Ways:
    """The ways of all nodes of a flat program, by the node, that as a whole first."""

    def __init__(self, program: Program, members: int):
        self.members = members
        self.nodes = [node for node in program.module.graph.nodes if node.op != "output"]
        self.reads = {node: _reads(node) for node in self.nodes}
        self.parameters = {port.name: port for port in program.ports(Role.PARAMETER)}
        self.places: dict[fx.Node, dict[Place, None]] = {node: {} for node in self.nodes}
        self._equations = {node: _equation(node) for node in self.nodes if not is_source(node)}
        self._items: dict[Any, dict[Any, fx.Node]] = {}
        for node in self.nodes:
            if node.target is operator.getitem:
                self._items.setdefault(node.args[0], {})[node.args[1]] = node
            if node.name in self.parameters:
                sizes = enumerate(self.parameters[node.name].shape)
                dims = [dim for dim, size in sizes if size and size % members == 0]
                self.places[node] = dict.fromkeys(map(Place, dims))
        # From parameters on and back, until nothing is new: a product that is taken apart into
        # heads says so of the weight before it.
        changed = True
        while changed:
            changed = any([self._spread(node) for node in (*self.nodes, *reversed(self.nodes))])
        self.of = {node: list(dict.fromkeys(self._ways(node))) for node in self.nodes}

    def _spread(self, node: fx.Node) -> bool:
        """Gives the values around a node the places that its ways have for them."""
        changed, results = False, self._results(node)
        for way in self._ways(node):
            pairs = [*zip(self.reads[node], way.operands, strict=True)]
            pairs += [(results[at], p) for at, p in enumerate(way.results) if at in results]
            for value, place in pairs:
                known = self.places[value]
                fixed = is_source(value) and value.name not in self.parameters
                if isinstance(place, Place) and not fixed and place not in known:
                    changed |= len(known) < _MOST
                    known.update({place: None} if len(known) < _MOST else {})
        return changed

    def _results(self, node: fx.Node) -> Mapping[Any, fx.Node]:
        """The nodes of its results, by their numbers."""
        several = isinstance(node.meta.get("val"), tuple | list)
        return self._items.get(node, {}) if several else {0: node}

    def _ways(self, node: fx.Node) -> Iterator[Way]:
        reads, value = self.reads[node], node.meta.get("val")
        results = len(value) if isinstance(value, tuple | list) else 1
        yield Way((None,) * len(reads), (None,) * results, cut=False)
        yield from self._in_parts(node)

    def _in_parts(self, node: fx.Node) -> Iterable[Way]:
        places: list[Where] = [*self.places[node]]
        if is_source(node):
            return [Way((), (place,)) for place in places]
        if node.target is operator.getitem:
            return [Way((place,), (place,)) for place in (*places, SUM)]
        if node.target is seeded:
            return self._dropouts(node)
        equation = self._equations[node]
        if equation is None:
            return ()
        # Sums that are added to one another: `merge_collectives` takes them once.
        both = node.target is torch.ops.aten.add.Tensor and len(self.reads[node]) == 2
        sums = [Way((SUM, SUM), (SUM,))] if both else []
        return itertools.chain(self._cuts(node, equation), sums)

    def _dropouts(self, node: fx.Node) -> Iterator[Way]:
        """Each member draws for the whole value, and keeps its part."""
        value = node.args[3] if node.args[0] is torch.ops.aten.native_dropout.default else None
        for place in [*self.places[value]] if isinstance(value, fx.Node) else ():
            operands = tuple(place if read is value else None for read in self.reads[node])
            yield Way(operands, (place, place))

    def _cuts(self, node: fx.Node, equation: Equation) -> Iterator[Way]:
        """Along the factors that begin where some operand or result may be cut."""
        results = self._results(node)
        tensors = [*zip(self.reads[node], equation.operands, strict=True)]
        tensors += [(results[i], dims) for i, dims in enumerate(equation.results) if i in results]
        places = [(dims, place) for value, dims in tensors for place in self.places[value]]
        for dims, place in places:
            for start in _starts(equation, dims, place):
                found = equation.at(dims, start)
                if found is not None and found[0].can_cut(found[1], self.members):
                    yield _along(*found)


def _starts(equation: Equation, dims: Dims, place: Place) -> Iterator[Place]:
    """A place, and those where factors of its dimension begin."""
    yield place
    before = 1
    for label in dims[place.dim]:
        yield Place(place.dim, before)
        before *= equation.sizes[label]


def _along(equation: Equation, label: Label) -> Way:
    """The way in which a factor is cut."""
    sums = equation.sums or (frozenset(),) * len(equation.results)
    operands = tuple(equation.place(dims, label) for dims in equation.operands)
    results = tuple(
        SUM if label in summed or (label in equation.recipes and place is None) else place
        for summed, place in zip(
            sums, (equation.place(dims, label) for dims in equation.results), strict=True
        )
    )
    return Way(operands, results)


def _equation(node: fx.Node) -> Equation | None:
    try:
        return equation_of(node)
    except NoRule:
        return None


def _reads(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node reads, in the order of its arguments, each as often as it is read."""
    reads: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), reads.append)
    return reads
