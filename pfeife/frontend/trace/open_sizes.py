"""Which sizes of its arguments a traced step leaves open, and what its trace has assumed of them.

the first call    words [4, 16]   mask [4, 16]
another one       words [4, 24]   mask [4, 24]    has another size in words.1 and mask.1
traced for it     words [4, a]    mask [4, a]     one size, as both were alike in all calls
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import sympy  # type: ignore[import-untyped]
import torch

from pfeife import _torch
from pfeife.frontend.batch import Arguments

Place = tuple[int, int]  # a tensor of the call, by its index, and a dimension
Shapes = tuple[tuple[int, ...], ...]


def open_places(
    call: Arguments, before: Sequence[Shapes], dynamic: bool | None
) -> dict[Place, str]:
    """The sizes that a call leaves open, by their places; those that were alike in all calls have
    one name. Those are open that were others in a call `before` or are marked by torch's
    `mark_dynamic` and its like, all if `dynamic`. Of 0 and 1 torch makes no symbols."""
    if dynamic is False:
        return {}
    names: dict[tuple[int, ...], str] = {}
    name_at = {}
    for at, leaf in enumerate(call.leaves):
        marked = _torch.open_dims(leaf.first)
        for dim, size in enumerate(leaf.first.shape):
            sizes = (*(shapes[at][dim] for shapes in before), size)
            if size > 1 and (dynamic or dim in marked or len(set(sizes)) > 1):
                name_at[at, dim] = names.setdefault(sizes, f"size_{len(names)}")
    return name_at


@attrs.frozen(eq=False)
class OpenSizes:
    """The sizes of a call's tensors: `layouts` have the shape and the strides of each, by its name,
    as numbers or expressions of named sizes, whose places are in `places`; `limits` are to be true
    of these. `shapes` are those of the call that was traced, `refused` says why no size could be
    open, "" if none was to be or some are."""

    shapes: Shapes
    layouts: Mapping[str, tuple[tuple[_torch.Size, ...], ...]]
    places: Mapping[str, Place] = attrs.field(factory=dict)
    limits: tuple[sympy.Basic, ...] = ()
    refused: str = ""

    def broken(self, call: Arguments) -> str:
        """What is otherwise in another call, "" if nothing."""
        tensors = [leaf.first for leaf in call.leaves]
        sizes = {name: tensors[at].shape[dim] for name, (at, dim) in self.places.items()}
        for leaf in call.leaves:
            layout = self.layouts[leaf.name]
            shape, strides = (_torch.sizes_at(numbers, sizes) for numbers in layout)
            if (shape, strides) != (tuple(leaf.first.shape), leaf.first.stride()):
                return f"the shape or the strides of {leaf.name}"
        limit = next((limit for limit in self.limits if not _torch.holds(limit, sizes)), None)
        return "" if limit is None else f"the sizes {sizes}, for which {limit} was assumed"


class Opening:
    """Symbols for the open sizes of a call, in a mode."""

    def __init__(self, mode: Any, call: Arguments, places: Mapping[Place, str]):
        self.call = call
        self.shapes = tuple(tuple(leaf.first.shape) for leaf in call.leaves)
        # Reversed, so that of several places with one name the first counts.
        self.places = {name: place for place, name in reversed([*places.items()])}
        sizes = {name: self.shapes[at][dim] for name, (at, dim) in sorted(self.places.items())}
        self.opened = _torch.OpenValues(sizes, mode)
        self.layouts = [
            self._layout(leaf.first, {d: name for (a, d), name in places.items() if a == at})
            for at, leaf in enumerate(call.leaves)
        ]

    @property
    def known(self) -> dict[Any, tuple[Any, int]]:
        """The open sizes by their symbols, and what they are now."""
        sizes, numbers = self.opened.sizes, self.opened.numbers
        return {_torch.symbol_named(sizes[name]): (sizes[name], numbers[name]) for name in sizes}

    def fixed(self) -> list[str]:
        """The names of those sizes that a run has taken for certain numbers."""
        return [name for name, size in self.opened.sizes.items() if _torch.is_fixed(size)]

    def _layout(self, first: torch.Tensor, names: Mapping[int, str]) -> tuple[list, list]:
        """The shape and the strides of a tensor: those of rows that lie one behind another are
        expressions of the sizes."""
        shape: list[Any] = [*first.shape]
        for dim, name in names.items():
            shape[dim] = self.opened.sizes[name]
        strides: list[Any] = [*first.stride()]
        dense, open_ = 1, 1
        # From the innermost dimension on: where the tensor is dense, a stride is the product of the
        # sizes inside of it, and grows with those that are open. Other strides stay numbers.
        for dim in sorted(range(first.dim()), key=lambda d: (first.stride(d), first.shape[d])):
            if first.stride(dim) == dense:
                strides[dim] = open_
                dense, open_ = dense * first.shape[dim], open_ * shape[dim]
        return shape, strides

    def sizes(self) -> OpenSizes:
        """What is known of the sizes, after a trace."""
        layouts = {
            leaf.name: tuple(_torch.named_sizes(numbers, self.opened.names) for numbers in layout)
            for leaf, layout in zip(self.call.leaves, self.layouts, strict=True)
        }
        return OpenSizes(self.shapes, layouts, self.places, self.opened.assumed())
