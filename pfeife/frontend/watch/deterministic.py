"""Runs in which what is drawn is what is expected of it, so that two of them can be compared."""

from typing import Any

import attrs
import torch
from torch import fx
from torch.utils import _pytree as pytree

from pfeife import _torch
from pfeife.ir.seeding import is_random, seeded

# What comes and goes with gradients.
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
# Operations whose numbers are sizes, strides and places.
_SHAPED = {
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "as_strided", "repeat"),
    *("unflatten", "empty", "zeros", "ones", "empty_strided", "new_empty", "new_zeros", "new_ones"),
    *("new_empty_strided", "zeros_like", "slice", "select", "narrow", "split", "split_with_sizes"),
    "unbind",
}
_MOST_NUMBERS = 64  # of a tensor that Python makes of its own, which are looked at
_ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-3}  # relative; other dtypes: a tenth


class Draws(Exception):
    """The step draws numbers that have no expected value to put in their place."""


class Expected(_torch.TorchDispatchMode):
    """Runs operations with the expected values of what they draw: dropout keeps everything. The
    generators are left alone."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        if func is aten.native_dropout.default and args[1] != 1:  # which drops all, and draws not
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if func is aten.native_dropout_backward.default and args[1].all():
            return args[0].clone()
        # The expected value of a draw of 0 or 1 is its probability.
        if func is aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        if is_random(func, args, kwargs):
            raise Draws(str(func))
        return func(*args, **kwargs)


@attrs.frozen
class RecordedOperation:
    """An operation that has run: its numbers, in order, and the shapes of what it gave."""

    name: str
    numbers: tuple[float, ...]
    shapes: tuple[tuple[int, ...], ...]


class Recorded(Expected):
    """The same, and lists what has run."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[RecordedOperation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        # Whether these are there depends on gradients, and not on what the step computes.
        if func in _SAME:
            return result
        leaves = pytree.tree_leaves((args, kwargs or {}))
        # Without bools, which count nothing.
        numbers = tuple(float(leaf) for leaf in leaves if type(leaf) in (int, float))
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if func is torch.ops.aten.lift_fresh.default and result.numel() <= _MOST_NUMBERS:
            real = torch.view_as_real(result) if result.is_complex() else result
            numbers += (*map(float, real.flatten().tolist()),)  # torch.tensor(0.1 * len(x))
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        self.operations.append(RecordedOperation(str(func).removeprefix("aten."), numbers, shapes))
        return result


def counts_rows(single: Recorded, twice: Recorded) -> str:
    """The first operation with another number for twice the rows, "" if there is none. The numbers
    of a shape, such as those of a view, may double with the rows in one dimension. Nothing is said
    where numbers are read from tensors: data make these."""
    if any(ran.name.startswith("_local_scalar_dense") for ran in single.operations):
        return ""
    if [ran.name for ran in single.operations] != [ran.name for ran in twice.operations]:
        return "another operation"
    for first, second in zip(single.operations, twice.operations, strict=True):
        if first.numbers != second.numbers and not _is_shape(first, second):
            return first.name
    return ""


def _is_shape(first: RecordedOperation, second: RecordedOperation) -> bool:
    """Whether the numbers of an operation are those of a shape, which has grown with the rows."""
    if first.name.partition(".")[0] not in _SHAPED:
        return False
    grown = [
        (size, more)
        for shape, larger in zip(first.shapes, second.shapes, strict=True)
        for size, more in zip(shape, larger, strict=True)
        if size != more
    ]
    return len(grown) <= 1 and all(more == 2 * size for size, more in grown)


class Unseeded(fx.Interpreter):
    """Runs a graph whose random operations are called as eager calls them, for `Expected`."""

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """An operation, without its seed."""
        if target is seeded:
            target, args = args[0], args[3:]
        return super().call_function(target, args, kwargs)


def close(
    first: torch.Tensor, second: torch.Tensor, within: float | None = None, noise: float = 1e-6
) -> bool:
    """Whether floating values agree to within rounding, or `within` a share of their size; what is
    as small as `noise` counts for nothing."""
    if first.shape != second.shape or not first.is_floating_point() or not first.numel():
        return True
    # Relative to the largest value: the small ones of a tensor are the differences of larger ones.
    first, second = first.detach(), second.detach()
    size = float(torch.maximum(first.abs(), second.abs()).max())
    share = within or _ROUNDING.get(first.dtype, 0.1)
    return float((first - second).abs().max()) <= share * size + noise
