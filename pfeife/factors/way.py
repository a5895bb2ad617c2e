"""A way in which members may compute a node, and what it takes for granted of open sizes."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from torch import fx

from pfeife import _torch
from pfeife.factors.equation import Chosen, Dims, Equation, Label, Place, tensors_of
from pfeife.factors.moves import SUM, Where
from pfeife.ir.nodes import unknown_sizes_of, value_of


@attrs.frozen
class Way:
    """How a node is computed: where its operands and results are, and whether each member computes
    its part alone, along a factor of an equation if that is told, or by an `exchange` of rows. That
    of a parameter is where it is."""

    operands: tuple[Where, ...]
    results: tuple[Where, ...]
    cut: bool = True
    equation: Equation | None = attrs.field(default=None, eq=False, repr=False)
    label: Label | None = attrs.field(default=None, eq=False)
    exchange: bool = False

    @property
    def by_data(self) -> bool:
        """Whether data decide what a member has of an operand or a result."""
        return any(isinstance(place, Chosen) for place in (*self.operands, *self.results))


def along(equation: Equation, label: Label) -> Way:
    """The way in which a factor is cut."""
    sums = equation.sums or (frozenset(),) * len(equation.results)
    operands: list[Where] = [equation.place(dims, label) for dims in equation.operands]
    results: list[Where] = [equation.place(dims, label) for dims in equation.results]
    results = [
        SUM if label in summed else place for summed, place in zip(sums, results, strict=True)
    ]
    if equation.once is not None and SUM in results:
        operands[equation.once] = SUM
    return Way((*operands,), (*results,), equation=equation, label=label)


def along_rows(equation: Equation, label: Label) -> Way:
    """The way in which rows are computed that data choose, and the experts that own them."""
    cut = equation.owned.get(label, label)

    def where(dims: Dims) -> Where:
        at = next((at for at, dim in enumerate(dims) if label in dim), None)
        return Chosen(at) if at is not None else equation.place(dims, cut)

    operands, results = ([*map(where, t)] for t in (equation.operands, equation.results))
    for at, summed in enumerate(equation.sums):
        if label in summed:
            results[at] = SUM
    if equation.once is not None and SUM in results:
        operands[equation.once] = SUM
    return Way((*operands,), (*results,), equation=equation, label=cut)


def limits(ways: Mapping[fx.Node, Way], members: int) -> tuple[Any, ...]:
    """That members divide the open sizes that are cut in the ways of some nodes."""
    return _torch.divided_by(members, _cut_sizes(ways, members))


def _cut_sizes(ways: Mapping[fx.Node, Way], members: int) -> Iterator[tuple[int, _torch.Size]]:
    """The sizes that are cut in the ways of some nodes, each behind the number that has to divide
    it. Those of several results are told of by who reads them."""
    for node, way in ways.items():
        values = [*zip(tensors_of(node), way.operands, strict=True), (node, way.results[0])]
        for value, place in values:
            if isinstance(place, Place) and value_of(value) is not None:
                yield members * place.before, unknown_sizes_of(value)[place.dim]
