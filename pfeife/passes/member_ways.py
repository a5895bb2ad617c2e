"""How members of a group compute each node: a linear program.

A node is computed in one of its ways (see `factors.ways`), which takes its seconds; what is sent
for a value to be where one of its readers wants it takes its own, once however many do. Its
relaxation is integral or nearly so (as autoparallel has found of more axes); where it is not, the
program in whole numbers is solved.

    variables    a way of a node        a value that is sent       what a reader takes of it
    cost         seconds / members      seconds                    0
                 all ways of a node are one; what a reader takes is there, and where it wants it

Nodes that look alike from near by, as those of repeated blocks, are one, as often as they are
there: blocks are cut alike, and a model of a hundred of them is no harder than one of four.
"""

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from torch import fx

from pfeife.factors.equation import Chosen, Place
from pfeife.factors.moves import SUM, Where, can_move, move_of
from pfeife.factors.way import Way
from pfeife.factors.ways import Ways
from pfeife.ir.members import exchanged_bytes, messages, peers, placed_rows
from pfeife.ir.nodes import is_source, node_bytes, returned, value_of
from pfeife.ir.parts import Role
from pfeife.ir.program import Program

_NEAR = 6  # nodes that look alike have alike neighbours up to this far
_GRADIENT, _RESULT = -1, -2  # who reads a gradient, or another result of the program
_WHOLE, _SECONDS = 1e-6, 60.0  # how near to a whole number, and how long to look for these
_TIES, _GOLDEN = 1e-4, 0.6180339887498949  # how far apart ties are put, of the mean cost


@attrs.frozen
class Prices:
    """Seconds that a node takes where it is computed as a whole, that bytes take from one member
    to another, that they take to be copied, and those of a microbatch for bytes that are sent once
    a step."""

    compute: Callable[[fx.Node], float]
    send: Callable[[int], float]
    copy: Callable[[int], float]
    once: Callable[[int], float] = lambda size: 0.0


def member_ways(
    program: Program, ways: Ways, prices: Prices, strict: bool = False
) -> dict[fx.Node, Way] | None:
    """The ways of a program's nodes with which it takes least, None if there are none: if it is
    `strict`, what has no rule is computed of what is whole without being gathered."""
    return _Problem(program, ways, prices, strict).solved()


@attrs.frozen
class _Rows:
    """Sums of variables that are something."""

    rows: list[int] = attrs.field(factory=list)
    variables: list[int] = attrs.field(factory=list)
    factors: list[float] = attrs.field(factory=list)
    sides: list[float] = attrs.field(factory=list)

    def add(self, terms: Iterable[tuple[int, float]], side: float = 0.0) -> None:
        for variable, factor in terms:
            self.rows.append(len(self.sides))
            self.variables.append(variable)
            self.factors.append(factor)
        self.sides.append(side)

    def matrix(self, variables: int) -> Any:
        shape = len(self.sides), variables
        return coo_array((self.factors, (self.rows, self.variables)), shape=shape).tocsr()


class _Problem:
    """The variables and rows of a program."""

    def __init__(self, program: Program, ways: Ways, prices: Prices, strict: bool):
        self.program, self.ways, self.prices, self.strict = program, ways, prices, strict
        self.fqns = {port.name: port.fqn for port in program.ports(Role.PARAMETER)}
        self.trained = {port.fqn for port in program.ports(Role.GRADIENT)}
        self.kinds = _kinds(ways, self.fqns)
        self.count = Counter(self.kinds.values())
        self.first = {kind: node for node, kind in reversed(self.kinds.items())}
        self.costs: list[float] = []
        self.equal, self.below = _Rows(), _Rows()
        self.taken = {
            kind: {way: self._variable(self._seconds(node, way)) for way in ways.of[node]}
            for kind, node in self.first.items()
        }
        self.sent: dict[tuple, int] = {}

    def _variable(self, cost: float) -> int:
        self.costs.append(cost)
        return len(self.costs) - 1

    def solved(self) -> dict[fx.Node, Way] | None:
        """The way of each node, None if nothing fits."""
        for ways in self.taken.values():
            self.equal.add(((variable, 1.0) for variable in ways.values()), 1.0)
        for source, reader, at in self._edges():
            self._edge(source, reader, at)
        chosen = [variable for ways in self.taken.values() for variable in ways.values()]
        shares = self._shares(np.zeros(len(self.costs)))
        if shares is not None and np.any(abs(shares[chosen] - np.rint(shares[chosen])) > _WHOLE):
            whole = np.zeros(len(self.costs))
            whole[chosen] = 1
            shares = self._shares(whole)
        if shares is None:
            return None
        best = {k: max(ways, key=lambda w: shares[ways[w]]) for k, ways in self.taken.items()}
        return {node: best[kind] for node, kind in self.kinds.items()}

    def _shares(self, whole: Any) -> Any:
        """The best values of the variables, of which some have to be `whole` numbers, or None."""
        # Of ways that take as long one is the best, so that all ranks find the same.
        costs = np.array(self.costs)
        mean = costs.mean() or 1.0
        costs = costs / mean + _TIES * (np.arange(len(costs)) * _GOLDEN % 1.0)
        rows = [
            LinearConstraint(rows.matrix(len(costs)), low, rows.sides)
            for rows, low in ((self.equal, self.equal.sides), (self.below, -np.inf))
            if rows.sides
        ]
        solution = milp(  # its tolerances are for numbers of about 1
            costs,
            integrality=whole,
            bounds=Bounds(0),
            constraints=rows,
            options={"time_limit": _SECONDS, "mip_rel_gap": 1e-3},
        )
        return solution.x

    def _seconds(self, node: fx.Node, way: Way) -> float:
        share = 1 / self.ways.members if way.cut else 1.0
        seconds = share * self.prices.compute(node) + self._passed(node, way)
        if node.name in self.fqns:
            seconds += self._held(node, way)
        return self.count[self.kinds[node]] * seconds

    def _held(self, node: fx.Node, way: Way) -> float:
        """Seconds in which members are told what they have of a parameter, and if it is trained
        keepers its gradient, to which each microbatch adds its own."""
        members = self.ways.members
        size = node_bytes(node) // (1 if way.results[0] is None else members)
        told = (members - 1) * self.prices.once(size // members)
        if self.fqns[node.name] not in self.trained:
            return told
        return 2 * told + self.prices.copy(size + size // 2)

    def _passed(self, node: fx.Node, way: Way) -> float:
        """Seconds in which parts of its operands go around all members."""
        members, reads = self.ways.members, self.ways.reads[node]
        if way.exchange:  # by an index of the rows of the first one
            row = node_bytes(reads[0]) // _length(reads[0])
            size = exchanged_bytes(_length(reads[0]), _length(reads[1]), row, members)
            return (members - 1) * (self.prices.send(8) + self.prices.send(size))
        if way.equation is None:
            return 0.0
        passed = (reads[at] for at in way.equation.passed.get(way.label, ()))
        return (members - 1) * sum(self.prices.send(node_bytes(read) // members) for read in passed)

    def _edges(self) -> dict[tuple[int, int, int], None]:
        """Who reads whom, at which place of its operands, by kinds."""
        edges: dict[tuple[int, int, int], None] = {}
        for node in self.ways.nodes:
            for at, read in enumerate(self.ways.reads[node]):
                edges[self.kinds[read], self.kinds[node], at] = None
        parameters = {
            self.fqns[node.name]: node for node in self.ways.nodes if node.name in self.fqns
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
        unsent = self.strict and at >= 0 and self.ways.has_no_rule(node)
        is_item = node.target is operator.getitem and at == 0
        index: Any = node.args[1] if is_item else 0
        given = _by_place((way.results[index], v) for way, v in self.taken[source].items())
        wanted = _by_place((_wanted(way, at), v) for way, v in self.taken[reader].items())
        moves = {
            (here, there): self._variable(0.0)
            for here in given
            for there in wanted
            # One of several results stays.
            if here == there or (can_move(here, there) and not is_item and not unsent)
        }
        for (here, there), move in moves.items():
            if at == _GRADIENT and (here, there) == (SUM, None):
                continue  # added up once a step, as replicas do
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
        if here == there or value is None:
            return 0.0
        size = value.numel() * value.dtype.itemsize
        if here is None or move_of(here, there) is placed_rows:
            return self.prices.copy(size // (1 if there == SUM else members))
        own = size // (members if isinstance(here, Place | Chosen) else 1)
        along = isinstance(here, Place) and isinstance(there, Place) and here.dim == there.dim
        sent = messages(move_of(here, there), own, members, along_one=along)
        return peers(move_of(here, there), members) * sum(map(self.prices.send, sent))


def _length(node: fx.Node) -> int:
    """The rows of a value."""
    return int(node.meta["val"].shape[0])


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


def _kinds(ways: Ways, fqns: Mapping[str, str]) -> dict[fx.Node, int]:
    """A number for each node, the same for those that look alike from near by (Weisfeiler and
    Leman's refinement, a few rounds); a parameter is that of its name in all blocks."""
    own = {node: hash(_own(node, ways, fqns)) for node in ways.nodes}
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
    return kinds | {node: own[node] for node in ways.nodes if node.name in fqns}


def _own(node: fx.Node, ways: Ways, fqns: Mapping[str, str]) -> tuple:
    """What a node is by itself."""
    value = node.meta.get("val")
    values: Sequence[Any] = value if isinstance(value, tuple | list) else [value]
    shapes = tuple(tuple(v.shape) if isinstance(v, torch.Tensor) else () for v in values)
    if node.name in fqns:
        return re.sub(r"\d+", "*", fqns[node.name]), shapes, tuple(ways.of[node])
    plain = repr(fx.node.map_arg((node.args, node.kwargs), lambda read: None))
    # Some may have ways that others have not: what is cut may be far away.
    target = node.name if is_source(node) else str(node.target)
    return node.op, target, shapes, plain, frozenset(ways.of[node])
