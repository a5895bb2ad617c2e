"""Runs in which what is drawn is what is expected of it, so that two of them can be compared."""

from typing import Any

import torch
from torch import fx

from pfeife import _torch
from pfeife.ir.seeding import is_random, seeded

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
        if func is aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        if is_random(func, args, kwargs):
            raise Draws(str(func))
        return func(*args, **kwargs)


class Unseeded(fx.Interpreter):
    """Runs a graph whose random operations are called as eager calls them, for `Expected`."""

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
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
    first, second = first.detach(), second.detach()
    size = float(torch.maximum(first.abs(), second.abs()).max())
    share = within or _ROUNDING.get(first.dtype, 0.1)
    return float((first - second).abs().max()) <= share * size + noise
