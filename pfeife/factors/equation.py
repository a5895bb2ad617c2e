"""An operation as an equation of factors: "b s h, o h -> b s o"."""

import math
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from pfeife import _torch
from pfeife.factors.recipes import Recipe
from pfeife.ir.nodes import is_sized_by_data, operation_name, unknown_sizes_of, value_of

Label = Hashable
Shape = tuple[_torch.Size, ...]  # sizes may be open: expressions
Dims = tuple[tuple[Label, ...], ...]  # of a tensor: the factors of each dimension, the outer first
_NONE: frozenset[Label] = frozenset()


class NoRule(Exception):
    """Raised where nothing is known of an operation."""


@attrs.frozen
class Place:
    """Where a factor begins: in a dimension, of which it is inside of so many blocks."""

    dim: int
    before: int = 1


@attrs.frozen
class Chosen:
    """Where rows are cut as data decide: in a dimension, by the experts to which they go."""

    dim: int


@attrs.frozen
class Equation:
    """The factors of one operation, each with its size.

        reshape     [4, 6] -> [24]       (a)(b) -> (a b)
        mm          [n, k] [k, m]        (n)(k), (k)(m) -> (n)(m)      a sum over k

    `operands` are the tensors that it reads, in the order of its arguments, `results` those that
    it gives. What is computed along a factor that is `whole` needs all of it. `sums` has, for each
    result, the factors over which it is a sum: cut there, every member has a part of it (of a mean,
    if it `averages`). A result without a factor that it is no sum over does not depend on where
    that is cut. `shape` names the argument that says the shape of the result, `counts` those that
    count the elements of a factor. An operand with the number `once` is added to a sum. Some that
    is `whole` has one of the `recipes` by which members do it together. Of those with `grains` a
    member has a multiple of so many elements. Of some recipes operands are `passed` around all
    members, each as often as its number is there. Rows that go to experts are `owned` by the factor
    of these: where that is cut, a member has the rows of its own ones.
    """

    sizes: Mapping[Label, _torch.Size]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    whole: frozenset[Label] = _NONE
    sums: tuple[frozenset[Label], ...] = ()
    averages: bool = False
    shape: str | None = None
    counts: Mapping[str, Label] = attrs.field(factory=dict)
    once: int | None = None
    recipes: Mapping[Label, Recipe] = attrs.field(factory=dict)
    grains: Mapping[Label, int] = attrs.field(factory=dict)
    passed: Mapping[Label, tuple[int, ...]] = attrs.field(factory=dict)
    owned: Mapping[Label, Label] = attrs.field(factory=dict)

    def can_cut(self, label: Label, members: int, calls: Sequence[Mapping[str, int]] = ()) -> bool:
        """Whether every member can compute its part along a factor, in calls with such sizes if it
        is open."""
        together = label not in self.whole or label in self.recipes
        size, grain = self.sizes[label], self.grains.get(label, 1)
        # Grains are of numbers, and a recipe is told how large a member's part is by an operand.
        told = label not in self.recipes or any((label,) in dims for dims in self.operands)
        known = isinstance(size, int) or (told and grain == 1)
        return together and known and _torch.divides(members * grain, size, calls)

    def at(self, dims: Dims, place: Place) -> "tuple[Equation, Label] | None":
        """The factor that begins at a place of one of its tensors, and the equation that has it:
        a factor may have to be taken apart for it.

            (b)(n)      with n of 8, from dimension 1 after 2      (b)(n0 n1) of 2 and 4
        """
        # A cut into t parts of what lies inside of `before` blocks is one of the factor that begins
        # there, if t divides it: what is inside of that factor stays together.
        outer = 1
        for label in dims[place.dim]:
            size = self.sizes[label]
            if outer == place.before:
                return self, label
            if not isinstance(size, int):
                return None
            first = place.before // outer
            if first < size and first * outer == place.before and size % first == 0:
                return None if label in self.whole else (self._apart(label, first), (label, 1))
            outer *= size
        return None

    def _apart(self, label: Label, first: int) -> "Equation":
        """The equation in which a factor is two."""
        two = ((label, 0), (label, 1))
        sizes = {key: size for key, size in self.sizes.items() if key != label}
        sizes |= {two[0]: first, two[1]: _torch.quotient(self.sizes[label], first)}

        def taken_apart(tensors: tuple[Dims, ...]) -> tuple[Dims, ...]:
            return tuple(
                tuple(
                    tuple(part for key in dim for part in (two if key == label else (key,)))
                    for dim in dims
                )
                for dims in tensors
            )

        return attrs.evolve(
            self,
            sizes=sizes,
            operands=taken_apart(self.operands),
            results=taken_apart(self.results),
            sums=tuple(summed | {*two} if label in summed else summed for summed in self.sums),
            counts={n: two[1] if key == label else key for n, key in self.counts.items()},
            grains={key: n for key, n in self.grains.items() if key != label}
            | ({two[1]: self.grains[label]} if label in self.grains else {}),
        )

    def place(self, dims: Dims, label: Label) -> Place | None:
        """Where a factor is in one of its tensors. Raises NoRule where that depends on sizes that
        are open."""
        for at, dim in enumerate(dims):
            if label in dim:
                before = math.prod(self.sizes[key] for key in dim[: dim.index(label)])
                if not isinstance(before, int):
                    raise NoRule
                return Place(at, before)
        return None


@attrs.frozen(eq=False)
class Operation:
    """A node with its arguments by the names of the schema."""

    node: fx.Node
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What it is called, without its overload."""
        return operation_name(self.node)

    @property
    def shape(self) -> Shape:
        """The shape of its result, or of the first of several."""
        return self.results[0]

    @property
    def operands(self) -> list[fx.Node]:
        """The tensors that it reads, in the order of its arguments, each as often as it is read."""
        return tensors_of(self.node)

    @property
    def shapes(self) -> list[Shape]:
        """Those of its operands."""
        return [shape_of(node) for node in self.operands]

    @property
    def results(self) -> list[Shape]:
        """The shapes of what it gives; () for what is no tensor. Of several the sizes that are open
        are known where somebody reads them."""
        value = self.node.meta.get("val")
        if not isinstance(value, list | tuple):
            return [shape_of(self.node) if isinstance(value, torch.Tensor) else ()]
        items = {user.args[1]: user for user in self.node.users if user.target is operator.getitem}
        is_open = any("sizes" in n.meta or is_sized_by_data(n) for n in self.operands)

        def shape(at: int, value: Any) -> Shape:
            if not isinstance(value, torch.Tensor):
                return ()
            if at in items:
                return shape_of(items[at])
            return (None,) * value.dim() if is_open else tuple(value.shape)

        return [shape(at, each) for at, each in enumerate(value)]

    def shape_of(self, name: str) -> Shape:
        """The shape of the operand with a name."""
        return shape_of(self.arguments[name])


Rule = Callable[[Operation], Equation]


def shape_of(node: Any) -> Shape:
    """The shape of what a node computes. Raises NoRule for no tensor."""
    if not isinstance(node, fx.Node) or value_of(node) is None:
        raise NoRule
    return unknown_sizes_of(node)


def tensors_of(node: fx.Node) -> list[fx.Node]:
    """What a node reads but for numbers, in the order of its arguments, each as often as it is
    read."""
    reads: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), reads.append)
    return [read for read in reads if not isinstance(read.meta.get("val"), int | float | bool)]


def labelled(labels: Iterable[Label], shape: Shape) -> Dims:
    """One factor for each dimension, none for those of size 1, along which it is broadcast."""
    pairs = zip(labels, shape, strict=True)
    return tuple((label,) if size != 1 else () for label, size in pairs)


def equation(
    operation: Operation,
    operands: Sequence[Sequence[Label]],
    results: Sequence[Sequence[Label]],
    whole: Iterable[Label] = (),
    shape: str | None = None,
) -> Equation:
    """The equation in which each dimension is a factor of its own, by its label.

    What is not in a result is summed there, but for what is `whole`.
    """
    sizes: dict[Label, _torch.Size] = {}
    shapes = [*operation.shapes, *operation.results[: len(results)]]
    for labels, dims in zip((*operands, *results), shapes, strict=True):
        if len(labels) != len(dims):
            raise NoRule
        for label, size in zip(labels, dims, strict=True):
            if size not in (1, None) and sizes.setdefault(label, size) != size:
                raise NoRule
    first = tuple(
        labelled(labels, dims) for labels, dims in zip(operands, operation.shapes, strict=True)
    )
    second = tuple(map(labelled, results, operation.results[: len(results)]))
    # By default what is read and not given is added up; whoever means otherwise says `whole`.
    read = {label for dims in first for dim in dims for label in dim}
    sums = tuple(
        frozenset(read - {label for dim in dims for label in dim} - {*whole}) for dims in second
    )
    return Equation(sizes, first, second, frozenset(whole) & sizes.keys(), sums, shape=shape)
