"""What is known of a value: how it depends on the rows of the batch."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import fx

from pfeife.ir.nodes import bound, operation_name, source_line, value_of

_NONE: frozenset[Any] = frozenset()


@attrs.frozen
class Rows:
    """How a value depends on the rows of the batch.

    `varies`: it may differ from microbatch to microbatch. `dim`: where its rows are, None for
    nowhere; that dimension has `before` times the rows times the rest, in this order. `power`: how
    it grows with the number of rows: 1 for a sum or a count, 0 for a mean. `maybe`: what the
    numbers in it would add to the power if they counted rows; `lost`: such a number has gone into
    a function that no power describes. `counts`: the nodes by which means in it were divided;
    `plain`: there are means over all rows in it.
    """

    varies: bool = False
    dim: int | None = None
    before: int = 1
    power: int = 0
    maybe: frozenset[int] = _NONE
    lost: bool = False
    counts: frozenset[fx.Node] = _NONE
    plain: bool = False


@attrs.frozen
class Unknown:
    """No rule says how a value depends on the rows, because of a node. `numbers`: it is a number
    that may count rows, which the graph for more rows would tell. `mixes`: there rows look at one
    another, as in attention between them or in a product for every pair. `whole`: it is one of all
    rows, such as the largest, and has none itself."""

    node: fx.Node
    numbers: bool = False
    mixes: bool = False
    whole: bool = False

    def __str__(self) -> str:
        return f"{operation_name(self.node)} in {source_line(self.node)}"


Known = Rows | Unknown
FIXED = Rows()


class Stuck(Exception):
    """Raised by a rule that does not cover its operation; see `Unknown`."""

    def __init__(self, numbers: bool = False, mixes: bool = False, whole: bool = False):
        self.numbers, self.mixes, self.whole = numbers, mixes, whole


@attrs.frozen(eq=False)
class RowOperation:
    """A node with its operands by the names of the schema, and what is known of them."""

    node: fx.Node
    arguments: Mapping[str, Any]
    rows_of: Mapping[fx.Node, Any]
    rows: int
    twin: fx.Node | None

    @property
    def name(self) -> str:
        """What it is called, without its overload."""
        return operation_name(self.node)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its result, or of the first of several. Raises Stuck for no tensor."""
        value = self.node.meta["val"]
        first = value[0] if isinstance(value, tuple | list) else value
        if not isinstance(first, torch.Tensor):
            raise Stuck
        return tuple(first.shape)

    def operands(self) -> list[tuple[fx.Node, Rows]]:
        """The tensors that it reads."""
        nodes: list[fx.Node] = []
        fx.node.map_arg(tuple(self.arguments.values()), nodes.append)
        return [(node, self.rows_of[node]) for node in nodes]

    @property
    def maybe(self) -> frozenset[int]:
        """What the numbers in all that it reads would add to the power if they counted rows."""
        return frozenset[int]().union(*(rows.maybe for _, rows in self.operands()))

    def of(self, name: str) -> Rows:
        """What is known of an operand: a tensor, or a number."""
        argument = self.arguments[name]
        return self.rows_of[argument] if isinstance(argument, fx.Node) else self.number(name)

    def number(self, name: str) -> Rows:
        """A number is fixed, or counts rows: the twin has the one for twice the rows."""
        value = self.arguments[name]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise Stuck
        if self.twin is None:
            return Rows(maybe=counting(value, self.rows))
        return Rows(power=growth(value, bound(self.twin)[name]))


def counting(value: float, rows: int) -> frozenset[int]:
    """The powers of the rows that a number may have: 1 for a multiple, -1 for one's inverse."""
    powers = set()
    if value and math.isfinite(value):
        for power, size in ((1, value), (-1, 1 / value)):
            multiple = round(size / rows)
            if multiple and math.isclose(size, multiple * rows, rel_tol=1e-6):
                powers.add(power)
    return frozenset(powers)


def growth(value: float, twice: float) -> int:
    """The power of the rows that a number has, from its value for twice the rows."""
    for power in (0, 1, -1):
        if math.isclose(twice, value * 2.0**power, rel_tol=1e-6):
            return power
    raise Stuck


def keeps_from_zero(node: fx.Node) -> bool:
    """Whether an operation does nothing but to keep a count from being zero: clamp(min=1), + 1e-8.
    What is added must be small beside a count, which is 1 or more."""
    arguments = bound(node)
    low = arguments.get("min", arguments.get("other"))
    most = 1e-3 if operation_name(node) == "add" else 1
    bounds = operation_name(node) in ("add", "clamp", "clamp_min", "maximum")
    is_small = isinstance(low, int | float) and 0 < low <= most
    return bounds and is_small and arguments.get("max") is None


def source_of(node: fx.Node) -> fx.Node:
    """A count without what keeps it from being zero."""
    while operation_name(node) == "_to_copy" or keeps_from_zero(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of what a node computes. Raises Stuck for no tensor."""
    value = value_of(node)
    if value is None:
        raise Stuck
    return tuple(value.shape)


def moves(rows: Any) -> bool:
    """Whether a value may differ from microbatch to microbatch, or grow with the rows."""
    return not isinstance(rows, Rows) or rows.varies or rows.dim is not None or rows.power != 0


Rule = Callable[[RowOperation], Any]
