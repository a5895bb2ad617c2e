"""For those who write passes: what every pass must keep, and random programs to try it on.

Read `check` first: it asserts what a pass must keep on a program of yours, compares two results,
has what plain PyTorch gives for a step, and names the gradients that a plan may change by rounding.
`random_net` is a net of any operations. `strategies` are Hypothesis strategies for nets, plans and
recomputation: they alone need hypothesis (pip install pfeife[dev]), and are imported when they are
asked for.
"""

from typing import TYPE_CHECKING, Any

from pfeife.testing.check import (
    assert_same,
    check_pass,
    eager_accumulation,
    own_gradients,
    tied_across,
)
from pfeife.testing.random_net import OPERATIONS, STATIC, Layer, RandomNet

if TYPE_CHECKING:
    from pfeife.testing.strategies import nets, plans, recomputing

__all__ = [
    "OPERATIONS",
    "STATIC",
    "Layer",
    "RandomNet",
    "assert_same",
    "check_pass",
    "eager_accumulation",
    "nets",
    "own_gradients",
    "plans",
    "recomputing",
    "tied_across",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from pfeife.testing import strategies
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"pfeife.testing.{name} needs hypothesis: pip install pfeife[dev]", name=error.name
        ) from error
    return getattr(strategies, name)
