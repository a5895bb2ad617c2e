"""In which ways members of a group may compute a program, where parameters are cut.

    w [8, 4] ----> mm ----> relu ----> ...
    0, 1, -       0, 1, -    0, 1, -       the places of a value: a dimension that is cut, or whole

Parameters may be cut where they are told to be, and the batch along each of its dimensions; from
there equations say how everything that is computed of them may be.
"""

import contextlib
import itertools
import operator
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from pfeife import _torch
from pfeife.factors.equation import (
    Chosen,
    Dims,
    Equation,
    Label,
    NoRule,
    Place,
    Rule,
    Shape,
    shape_of,
    tensors_of,
)
from pfeife.factors.experts import Owners
from pfeife.factors.moves import SUM, Where
from pfeife.factors.rules import RULES, equation_of
from pfeife.factors.way import Way, along, along_rows
from pfeife.ir.nodes import bound, is_source, operation_name, returned, value_of
from pfeife.ir.parts import Role, captured_sizes
from pfeife.ir.program import Program
from pfeife.ir.seeding import seeded

aten = torch.ops.aten
_MOST = 8  # places of one value
# Of a sum of parts they give the sum of what they give of each.
_LINEAR = (
    *("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze"),
    *("expand", "clone", "alias", "detach", "neg", "sum", "_to_copy"),
)
_MADE = ("new_zeros", "new_ones", "new_empty", "new_full")  # with sizes of their own


class Ways:
    """The ways of all nodes of a flat program, by the node, that as a whole first.

    `parameters` says, by the names of their ports, where each may be; what is not there is whole.
    Those that are `free` may be cut wherever it is of use for what is computed of them. Operations
    have their equations by `rules`. Sizes that are open are cut where the members divide them as
    they were captured, and in all `calls` that have such ones.
    """

    def __init__(
        self,
        program: Program,
        members: int,
        parameters: Mapping[str, Sequence[Place | None]],
        free: Container[str] = (),
        rules: Mapping[str, Rule] = RULES,
        calls: Sequence[Mapping[str, int]] = (),
    ):
        self.members, self.parameters, self.free = members, parameters, free
        self.calls = (captured_sizes(program), *calls)
        self.nodes = [node for node in program.module.graph.nodes if node.op != "output"]
        self.reads = {node: tensors_of(node) for node in self.nodes}
        self.places: dict[fx.Node, dict[Place | Chosen, None]] = {node: {} for node in self.nodes}
        self.owners: dict[fx.Node, Owners] = {}  # of values with rows that data choose
        self._before: dict[fx.Node, set[fx.Node]] = {}
        computed = (node for node in self.nodes if not is_source(node))
        self._equations = {node: _equation(node, rules) for node in computed}
        self._items: dict[Any, dict[Any, fx.Node]] = {}
        self._cut: dict[tuple[fx.Node, int, Place], list[Way]] = {}
        batch = {port.name for port in program.ports(Role.BATCH)}
        for node in self.nodes:
            if node.target is operator.getitem:
                self._items.setdefault(node.args[0], {})[node.args[1]] = node
            elif node.name in parameters:
                self.places[node] = dict.fromkeys(p for p in parameters[node.name] if p)
            elif node.name in batch:
                self.places[node] = dict.fromkeys(self._dividing(node))
        for node, place in self._wanted_gradients(program):
            self.places[node][place] = None
        # From these on and back, until nothing is new: a product that is taken apart into heads
        # says so of the weight before it.
        todo = dict.fromkeys((*self.nodes, *reversed(self.nodes)))
        while todo:
            node = next(iter(todo))
            del todo[node]
            for value in self._spread(node):
                todo |= dict.fromkeys(self._around(value))
        self.of = {node: list(dict.fromkeys(self._ways(node))) for node in self.nodes}
        for node in self.nodes:
            if node.name in parameters and None not in parameters[node.name]:
                del self.of[node][0]

    def _wanted_gradients(self, program: Program) -> Iterator[tuple[fx.Node, Place]]:
        """Gradients, and where their parameters may be."""
        names = {port.fqn: port.name for port in program.ports(Role.PARAMETER)}
        results = returned(program.module)
        for port in program.ports(Role.GRADIENT):
            gradient, places = results[port.name], self.parameters.get(names.get(port.fqn, ""), ())
            if not is_source(gradient):
                yield from ((gradient, place) for place in places if place is not None)

    def has_no_rule(self, node: fx.Node) -> bool:
        """Whether nothing is known of how a node may be computed on parts."""
        if is_source(node) or node.target is operator.getitem:
            return False
        dropout = node.target is seeded and node.args[0] is aten.native_dropout.default
        return self._equations[node] is None and not dropout

    def _dividing(self, node: fx.Node) -> list[Place]:
        """The dimensions of a value that members divide."""
        return dividing(shape_of(node), self.members, self.calls)

    def _around(self, value: fx.Node) -> Iterator[fx.Node]:
        """The nodes that have a value as operand or result."""
        yield value.args[0] if value.target is operator.getitem else value  # type: ignore[misc]
        yield from (user for user in value.users if user in self.places)

    def _spread(self, node: fx.Node) -> list[fx.Node]:
        """Gives the values around a node the places that its ways have for them; gives those that
        had not had them."""
        changed, results = [], self._results(node)
        for way in self._ways(node):
            pairs = [*zip(self.reads[node], way.operands, strict=True)]
            pairs += [(results[at], p) for at, p in enumerate(way.results) if at in results]
            for value, place in pairs:
                known = self.places[value]
                if not isinstance(place, Place | Chosen) or place in known or len(known) == _MOST:
                    continue
                if isinstance(place, Chosen):
                    owners = self.owners_of(node)
                    if owners is None or is_source(value) or value in self._decide(owners):
                        continue
                    if self.owners.setdefault(value, owners) != owners:
                        continue
                elif is_source(value) and value.name not in self.free:
                    continue
                known[place] = None
                changed.append(value)
        return changed

    def owners_of(self, node: fx.Node) -> Owners | None:
        """Those of the rows of a node's operands and results that data choose, if they are the
        same."""
        equation = self._equations.get(node)
        if equation is not None and equation.owned:
            arguments = bound(node)
            return Owners(arguments["offs"], equation.sizes[next(iter(equation.owned.values()))])
        values = (*self.reads[node], *self._results(node).values())
        owners = {self.owners[value] for value in values if value in self.owners}
        return owners.pop() if len(owners) == 1 else None

    def _decide(self, owners: Owners) -> set[fx.Node]:
        """What is computed to know which rows are whose: each member needs all of it."""
        if owners.offsets not in self._before:
            before, todo = self._before.setdefault(owners.offsets, set()), [owners.offsets]
            while todo:
                value = todo.pop()
                if value not in before:
                    before.add(value)
                    todo += value.all_input_nodes
        return self._before[owners.offsets]

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
        if operation_name(node) not in _MADE:
            return self._by_factors(node)
        # It is the type of what it reads that matters, wherever that is.
        (read,) = self.reads[node]
        ways = [Way((None,), (None,), cut=False), *self._by_factors(node)]
        places = (None, SUM, *self.places[read])
        return [attrs.evolve(way, operands=(place,)) for place in places for way in ways]

    def _by_factors(self, node: fx.Node) -> Iterable[Way]:
        places: list[Where] = [*self.places[node]]
        if is_source(node):
            # The batch is the same on all members: each may take its part of it.
            return [Way((), (place,)) for place in places if node.name in self.parameters]
        if node.target is operator.getitem:
            return [Way((place,), (place,)) for place in (*places, SUM)]
        if node.target is seeded:
            return self._dropouts(node)
        equation = self._equations[node]
        if equation is None:
            return ()
        return itertools.chain(
            self._cuts(node, equation), self._exchanges(node, equation), self._of_sums(node)
        )

    def _of_sums(self, node: fx.Node) -> Iterator[Way]:
        """Of parts of sums, which are added up later and together."""
        reads = len(self.reads[node])
        name, both = operation_name(node), node.target is aten.add.Tensor and not node.kwargs
        is_linear = both if reads == 2 else reads == 1 and name in _LINEAR
        if is_linear and _adds_alike(node):
            yield Way((SUM,) * reads, (SUM,))
        elif name == "index":
            yield Way((SUM, *(None,) * (reads - 1)), (SUM,))
        elif name == "index_put" and bound(node)["accumulate"]:
            yield Way((SUM, *(None,) * (reads - 2), SUM), (SUM,))

    def _exchanges(self, node: fx.Node, equation: Equation) -> Iterator[Way]:
        """Of rows that an index says, by who has them and who reads them: one of both, data have
        cut, the other is cut into equal parts."""
        name, reads = operation_name(node), self.reads[node]
        if name not in ("index", "index_put") or not _of_rows(node, equation):
            return
        if self.owners_of(node) is None:
            return
        rows: tuple[Where, Where] = Place(0), Chosen(0)
        for here, there in (rows, rows[::-1]):
            value = reads[0] if name == "index" else reads[-1]
            if (value if isinstance(here, Chosen) else node) not in self.owners:
                continue
            cut = node if isinstance(here, Chosen) else value
            if Place(0) not in self._dividing(cut):
                continue
            if name == "index":
                yield Way((here, None), (there,), exchange=True)
            elif bound(node)["accumulate"]:
                yield Way((there, None, here), (there,), exchange=True)

    def _dropouts(self, node: fx.Node) -> Iterator[Way]:
        """Each member draws for the whole value, and keeps its part."""
        is_dropout = node.args[0] is aten.native_dropout.default
        drops = is_dropout and node.args[4] != 1 and node.args[5] is not False
        value = node.args[3] if drops else None
        for place in [*self.places[value]] if isinstance(value, fx.Node) else ():
            if isinstance(place, Chosen):
                continue
            operands = tuple(place if read is value else None for read in self.reads[node])
            yield Way(operands, (place, place))

    def _cuts(self, node: fx.Node, equation: Equation) -> Iterator[Way]:
        """Along the factors that begin where some operand or result may be cut."""
        results = self._results(node)
        for label in equation.owned:
            yield from self._by_data(node, equation, (label,))
        tensors = [*zip(self.reads[node], equation.operands, strict=True)]
        tensors += [(results[i], dims) for i, dims in enumerate(equation.results) if i in results]
        each = enumerate(tensors)
        places = [(at, dims, p) for at, (value, dims) in each for p in self.places[value]]
        for at, dims, place in places:
            if isinstance(place, Chosen):
                yield from self._by_data(node, equation, dims[place.dim])
                continue
            # Asked for again whenever there are new places around the node.
            key = node, at, place
            if key not in self._cut:
                self._cut[key] = [*self._starting(equation, dims, place)]
            yield from self._cut[key]

    def _by_data(self, node: fx.Node, equation: Equation, labels: Sequence[Label]) -> Iterator[Way]:
        """Along rows that data choose, where all that have them have them alike."""
        owners, results = self.owners_of(node), self._results(node)
        if owners is None or len(labels) != 1 or not _chooses(equation, labels[0], self.members):
            return
        way = along_rows(equation, labels[0])
        pairs = [*zip(self.reads[node], way.operands, strict=True)]
        pairs += [(results[at], p) for at, p in enumerate(way.results) if at in results]
        chosen = [value for value, place in pairs if isinstance(place, Chosen)]
        before = self._decide(owners)
        if all(self.owners.get(value, owners) == owners for value in chosen) and not any(
            value in before for value, _ in pairs[len(way.operands) :]
        ):
            yield way

    def _starting(self, equation: Equation, dims: Dims, place: Place) -> Iterator[Way]:
        """Along the factors that begin at a place of a tensor, or in its dimension."""
        for start in _starts(equation, dims, place):
            found = equation.at(dims, start)
            if found is not None and found[1] in equation.owned.values():
                continue  # by the rows of experts
            if found is not None and found[0].can_cut(found[1], self.members, self.calls):
                with contextlib.suppress(NoRule):  # open sizes say where a factor is
                    yield along(*found)


def _adds_alike(node: fx.Node) -> bool:
    """Whether addends of its operands add up as its result does: in the same type, or, as gradients
    are added up, in a wider one of floats. Sums of integers wrap, and those of bools are an or."""
    values = (value_of(each) for each in (node, *tensors_of(node)))
    result, *operands = (value.dtype for value in values if value is not None)
    floats = all(dtype.is_floating_point for dtype in (result, *operands))
    wider = all(torch.promote_types(dtype, result) == result for dtype in operands)
    return {*operands} == {result} or (floats and wider)


def _starts(equation: Equation, dims: Dims, place: Place) -> Iterator[Place]:
    """A place, and those where factors of its dimension begin."""
    yield place
    before = 1
    for label in dims[place.dim]:
        yield Place(place.dim, before)
        size = equation.sizes[label]
        if not isinstance(size, int):
            return
        before *= size


def _chooses(equation: Equation, label: Label, members: int) -> bool:
    """Whether a member can compute what it has of rows that data choose."""
    if label not in equation.sizes:
        return False  # there is one row
    if label in equation.owned:
        return equation.can_cut(equation.owned[label], members)
    tensors = (*equation.operands, *equation.results)
    alone = all(dim == (label,) for dims in tensors for dim in dims if label in dim)
    sized = equation.shape is not None or label in equation.counts.values() or equation.averages
    return alone and not sized and label not in equation.whole and label not in equation.grains


def _of_rows(node: fx.Node, equation: Equation) -> bool:
    """Whether an index is one of whole rows, and values that are put there are as many."""
    arguments = bound(node)
    indices = arguments["indices"]
    rows, index = equation.operands[:2]
    if len(indices) != 1 or indices[0] is None or (len(rows[0]), len(index)) != (1, 1):
        return False
    put = equation.operands[-1] if "values" in arguments else equation.results[0]
    return len(index[0]) == 1 and len(put) == len(rows) and put[0] == index[0]


def dividing(shape: Shape, members: int, calls: Sequence[Mapping[str, int]] = ()) -> list[Place]:
    """The dimensions that members divide, of open sizes in such calls."""
    sizes = enumerate(shape)
    return [Place(dim) for dim, size in sizes if size and _torch.divides(members, size, calls)]


def _equation(node: fx.Node, rules: Mapping[str, Rule]) -> Equation | None:
    values = [*map(value_of, (node, *tensors_of(node)))]
    if any(value is not None and value.layout != torch.strided for value in values):
        return None  # of sparse ones there are no parts
    try:
        return equation_of(node, rules)
    except NoRule:
        return None
