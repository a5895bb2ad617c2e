"""Sizes and numbers that only data tell (`x.nonzero()`, `x.item()`): torch gives them symbols.

If the symbols' ranges move: a bound of `largest` alone is as good for everything but the account of
memory.
"""

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from pfeife._torch.tensors import FakeTensorMode

Symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
_ENDLESS = 2**40  # no bound of a size that somebody has set


def symbolic_mode() -> FakeTensorMode:
    """A mode in which what only data tell has a symbol while a graph is traced."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def without_symbols(value: Any, largest: int) -> tuple[Any, bool]:
    """A fake value with numbers in place of symbols, and whether a tensor in it had any.

    A size gets the most that it can be, or `largest` where there is no bound; sizes that are
    computed of one another stay consistent.
    """
    leaves, structure = pytree.tree_flatten(value)
    told = [_told(leaf, largest) for leaf in leaves]
    return pytree.tree_unflatten([one for one, _ in told], structure), any(by for _, by in told)


def _told(value: Any, largest: int) -> tuple[Any, bool]:
    if isinstance(value, Symbolic):
        return _number(value, largest)[0], False
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value, False
    numbers = (*value.shape, *value.stride())
    if not any(isinstance(one, Symbolic) for one in numbers):
        return value, False
    told = [_number(one, largest) for one in numbers]
    sizes = [number for number, _ in told]
    with value.fake_mode:  # type: ignore[attr-defined]
        like = torch.empty_strided(
            sizes[: value.dim()], sizes[value.dim() :], dtype=value.dtype, device=value.device
        )
    return like, any(by for _, by in told)


def _number(value: Any, largest: int) -> tuple[Any, bool]:
    """A number, and whether data decide it."""
    if not isinstance(value, Symbolic):
        return value, False
    environment = value.node.shape_env
    expression = environment.replace(value.node.expr)
    symbols = expression.free_symbols
    plain = expression.xreplace({one: _most(environment, one, largest) for one in symbols})
    kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
    return kind(plain), bool(symbols)


def _most(environment: Any, symbol: Any, largest: int) -> Any:
    """The most that a symbol can be."""
    hint = environment.backed_var_to_val.get(symbol)
    if hint is not None:
        return hint
    if not symbol.is_integer:
        return 1.0
    limits = environment.var_to_range[symbol]
    most = limits.upper if limits.upper < _ENDLESS else largest
    return max(int(most), int(limits.lower) if limits.lower > -_ENDLESS else 0)
