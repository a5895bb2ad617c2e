"""Fake values whose sizes are expressions of named sizes, for what operations make of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from pfeife._torch.size_arithmetic import divisors, without_remainders
from pfeife._torch.sizes import (
    Symbolic,
    assumed_of_sizes,
    is_unbacked,
    name_of_size,
    new_size,
    sizes_at,
    with_numbers,
)
from pfeife._torch.tensors import FakeTensorMode, fake_on, fake_tensor


class OpenValues:
    """Values in a mode, or one of their own, in which named sizes are symbols, which are now so
    large; without any, plain fake values.

    [4, 7] of [rows, length]  -> value ->  [s0, s1]
    flattened [s0 * s1]       -> told ->   [28] of [rows * length]
    """

    def __init__(self, sizes: Mapping[str, int], mode: FakeTensorMode | None = None):
        # Without named sizes there is nothing that a symbol could stand for.
        environment: Any = ShapeEnv() if sizes else None
        self.mode = mode or FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment)
        self.numbers = dict(sizes)
        self.sizes = {
            name: new_size(self.mode, at, number) for at, (name, number) in enumerate(sizes.items())
        }
        self.own = {name_of_size(name): size.node.expr for name, size in self.sizes.items()}
        self.names = {own: named for named, own in self.own.items()}
        self.divided: Mapping[Any, int] = {}  # named sizes, and what is known to divide them

    def value(self, value: Any, layout: Any = None, device: torch.device | None = None) -> Any:
        """A fake value here, and perhaps on another device, with the sizes and strides that an
        expression of sizes tells; what is no tensor as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        place = device or value.device
        if layout is None:
            return fake_on(value, place, self.mode)
        shape, strides = (tuple(map(self._size, numbers)) for numbers in layout)
        return fake_tensor(self.mode, value.dtype, place, shape, strides, 0)

    def _size(self, size: Any) -> Any:
        if isinstance(size, int):
            return size
        environment: Any = self.mode.shape_env
        (hint,) = sizes_at([size], self.numbers)
        return environment.create_symintnode(size.xreplace(self.own), hint=hint, source=None)

    def told(self, value: Any) -> tuple[Any, Any]:
        """A value with numbers in place of symbols, and the sizes and strides of a tensor as
        expressions, None if they are numbers. Raises ValueError where data decide them."""
        leaves = pytree.tree_leaves(value)
        sizes = (size for leaf in leaves if isinstance(leaf, torch.Tensor) for size in leaf.shape)
        for size in (*leaves, *sizes):
            if isinstance(size, Symbolic) and any(map(is_unbacked, size.node.expr.free_symbols)):
                raise ValueError("data decide its size")
        # No size is unbounded here, so that the largest one is never asked for.
        plain, _, layout = with_numbers(value, 1, self.names)
        if layout is not None:
            layout = tuple(
                tuple(without_remainders(size, self.divided) for size in sizes) for sizes in layout
            )
        return plain, layout

    def assume(self, limits: Sequence[sympy.Basic]) -> None:
        """Takes for granted what is known of the sizes, as expressions of their names."""
        if not self.sizes:
            return
        environment: Any = self.mode.shape_env
        for limit in limits:
            environment.evaluate_expr(limit.xreplace(self.own))
        self.divided = divisors(tuple(limits))

    def assumed(self) -> tuple[sympy.Basic, ...]:
        """What has been assumed of the sizes so far, as expressions of their names."""
        return assumed_of_sizes([*self.sizes.values()], self.names)
