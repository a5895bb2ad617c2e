"""Along which dimensions to cut parameters over the members of a group: a linear program.

Each node is computed in one of its ways (see `factors.ways`), which takes its seconds; what is sent
for a value to be where one of its readers wants it takes its own, once however many do. Its
relaxation is integral or nearly so (as autoparallel has found of more axes), so that one solution
of it is enough.

    variables    a way of a node        a value that is sent       what a reader takes of it
    cost         seconds / members      seconds                    0
                 all ways of a node are one; what a reader takes is there, and where it wants it

Nodes that look alike from near by, as those of repeated blocks, are one, as often as they are
there: blocks are cut alike, and a model of a hundred of them is no harder than one of four.
"""

import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse import coo_array
from torch import fx

from pfeife.cost.estimate import node_seconds
from pfeife.data.machine import Machine
from pfeife.factors.equation import Place
from pfeife.factors.ways import SUM, Way, Ways, Where
from pfeife.ir.nodes import is_source, returned, value_of
from pfeife.ir.parts import Role
from pfeife.ir.program import Program

_NEAR = 6  # nodes that look alike have alike neighbours up to this far
_GRADIENT, _RESULT = -1, -2  # who reads a gradient, or another result of the program


def best_placements(
    program: Program, members: int, machine: Machine, known: Mapping[str, bool] | None = None
) -> dict[str, Place]:
    """The places of the parameters of a flat program, by name, with which a step takes least by
    estimate: for `shard`. Each matrix of which `members` divide a dimension is cut, so that its
    memory is; vectors where it pays. `known` says of some whether they are cut."""
    ways = Ways(program, members)
    nodes = [node for node in ways.nodes if node.name in ways.parameters]
    for node in nodes:
        port = ways.parameters[node.name]
        whole, *cut = ways.of[node]
        is_cut = (known or {}).get(port.fqn, True if len(port.shape) > 1 else None)
        if cut and is_cut is not None:
            ways.of[node] = cut if is_cut else [whole]
    taken = _Problem(program, ways, machine).solved()
    places = {ways.parameters[node.name].fqn: taken[node].results[0] for node in nodes}
    return {name: place for name, place in places.items() if isinstance(place, Place)}


@attrs.frozen
class _Rows:
    """Sums of variables that are something."""

    entries: list[tuple[int, int, float]] = attrs.field(factory=list)  # row, variable, factor
    sides: list[float] = attrs.field(factory=list)

    def add(self, terms: Iterable[tuple[int, float]], side: float = 0.0) -> None:
        self.entries.extend((len(self.sides), variable, factor) for variable, factor in terms)
        self.sides.append(side)

    def matrix(self, variables: int) -> Any:
        rows, columns, factors = zip(*self.entries, strict=True)
        return coo_array((factors, (rows, columns)), shape=(len(self.sides), variables)).tocsr()


class _Problem:
    """The variables and rows of a program."""

    def __init__(self, program: Program, ways: Ways, machine: Machine):
        self.program, self.ways, self.machine = program, ways, machine
        self.kinds = _kinds(ways)
        self.count = Counter(self.kinds.values())
        self.first = {kind: node for node, kind in reversed(self.kinds.items())}
        self.costs: list[float] = []
        self.equal, self.below = _Rows(), _Rows()
        self.taken = {
            kind: {way: self._variable(self._seconds(node, way)) for way in ways.of[node]}
            for kind, node in self.first.items()
        }
        self.sent: dict[tuple, int] = {}
        self.there: dict[tuple, list[int]] = {}  # what a reader takes of what is there already

    def _variable(self, cost: float) -> int:
        self.costs.append(cost)
        return len(self.costs) - 1

    def solved(self) -> dict[fx.Node, Way]:
        """The way of each node."""
        for ways in self.taken.values():
            self.equal.add(((variable, 1.0) for variable in ways.values()), 1.0)
        for source, reader, at in self._edges():
            self._edge(source, reader, at)
        for kind, ways in self.taken.items():
            for way, variable in ways.items():
                if way.cut and way.operands:
                    # As `shard` does it: along what some operand is cut along already.
                    places = enumerate(way.operands)
                    there = [v for at, p in places for v in self.there.get((kind, at, p), ())]
                    self.below.add([(variable, 1.0), *((v, -1.0) for v in there)])
        count = len(self.costs)
        solution = linprog(
            np.array(self.costs),
            A_ub=self.below.matrix(count) if self.below.sides else None,
            b_ub=self.below.sides or None,
            A_eq=self.equal.matrix(count),
            b_eq=self.equal.sides,
        )
        if solution.x is None:  # all as a whole always is one, but for what is known
            raise ValueError(f"parallel='auto': {solution.message}; say how parameters are cut")
        shares = solution.x
        best = {k: max(ways, key=lambda w: shares[ways[w]]) for k, ways in self.taken.items()}
        return {node: best[kind] for node, kind in self.kinds.items()}

    def _seconds(self, node: fx.Node, way: Way) -> float:
        share = 1 / self.ways.members if way.cut else 1.0
        return self.count[self.kinds[node]] * share * node_seconds(node, self.machine)

    def _edges(self) -> dict[tuple[int, int, int], None]:
        """Who reads whom, at which place of its operands, by kinds."""
        edges: dict[tuple[int, int, int], None] = {}
        for node in self.ways.nodes:
            for at, read in enumerate(self.ways.reads[node]):
                edges[self.kinds[read], self.kinds[node], at] = None
        parameters = {
            self.ways.parameters[node.name].fqn: node
            for node in self.ways.nodes
            if node.name in self.ways.parameters
        }
        results = returned(self.program.module)
        for port in self.program.outputs:
            source = results[port.name]
            if port.role == Role.GRADIENT and port.fqn in parameters:
                edges[self.kinds[source], self.kinds[parameters[port.fqn]], _GRADIENT] = None
            else:
                edges[self.kinds[source], self.kinds[source], _RESULT] = None
        return edges

    def _edge(self, source: int, reader: int, at: int) -> None:
        """A reader takes a value where it wants it, from where that is."""
        node = self.first[reader]
        is_item = node.target is operator.getitem and at == 0
        index: Any = node.args[1] if is_item else 0
        given = _by_place((way.results[index], v) for way, v in self.taken[source].items())
        wanted = _by_place((_wanted(way, at), v) for way, v in self.taken[reader].items())
        moves = {
            (here, there): self._variable(0.0)
            for here in given
            for there in wanted
            # A sum is added up where it is wanted otherwise; one of several results stays.
            if here == there or not (is_item or there == SUM or (here == SUM and there))
        }
        for (here, there), move in moves.items():
            if here == there is not None:
                self.there.setdefault((reader, at, there), []).append(move)
            key = source, index, here, there
            if key not in self.sent:
                self.sent[key] = self._variable(self.count[source] * self._moved(source, *key[2:]))
            self.below.add([(move, 1.0), (self.sent[key], -1.0)])
        for side, places in enumerate((given, wanted)):
            for place, variables in places.items():
                through = [(move, 1.0) for ends, move in moves.items() if ends[side] == place]
                self.equal.add([*through, *((variable, -1.0) for variable in variables)])

    def _moved(self, source: int, here: Where, there: Where) -> float:
        """Seconds until a value is where it is wanted."""
        value, members = value_of(self.first[source]), self.ways.members
        if here == there or here is None or value is None:
            return 0.0
        parts = 1 if here == SUM else members if there is None else members**2
        sent = value.numel() * value.dtype.itemsize // parts
        return (members - 1) * self.machine.transfer_seconds(sent)


def _wanted(way: Way, at: int) -> Where:
    """A gradient is wanted where its parameter is, another result as a whole."""
    if at == _RESULT:
        return None
    return way.results[0] if at == _GRADIENT else way.operands[at]


def _by_place(pairs: Iterable[tuple[Where, int]]) -> dict[Where, list[int]]:
    variables: dict[Where, list[int]] = {}
    for place, variable in pairs:
        variables.setdefault(place, []).append(variable)
    return variables


def _kinds(ways: Ways) -> dict[fx.Node, int]:
    """A number for each node, the same for those that look alike from near by (Weisfeiler and
    Leman's refinement, a few rounds); a parameter is that of its name in all blocks."""
    own = {node: hash(_own(node, ways)) for node in ways.nodes}
    kinds = own
    for _ in range(_NEAR):
        around = kinds
        kinds = {
            node: hash(
                (
                    around[node],
                    tuple(around[read] for read in ways.reads[node]),
                    tuple(sorted(around[user] for user in node.users if user in around)),
                )
            )
            for node in ways.nodes
        }
    return kinds | {node: own[node] for node in ways.nodes if node.name in ways.parameters}


def _own(node: fx.Node, ways: Ways) -> tuple:
    """What a node is by itself."""
    port = ways.parameters.get(node.name)
    name = re.sub(r"\d+", "*", port.fqn) if port else node.name if is_source(node) else ""
    value = node.meta.get("val")
    values: Sequence[Any] = value if isinstance(value, tuple | list) else [value]
    shapes = tuple(tuple(v.shape) if isinstance(v, torch.Tensor) else () for v in values)
    plain = repr(fx.node.map_arg((node.args, node.kwargs), lambda read: None))
    return node.op, "" if is_source(node) else str(node.target), name, shapes, plain
