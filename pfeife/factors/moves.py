"""Where a value is, and what brings it to where it is wanted."""

from collections.abc import Callable

import torch

from pfeife.factors.equation import Chosen, Place
from pfeife.ir.members import (
    addend,
    all_gather,
    all_reduce,
    all_to_all,
    joined_rows,
    own_rows,
    part,
    placed_rows,
    reduce_scatter,
)

SUM = "sum"  # where a value is of which each member has a part of the sum
Where = Place | Chosen | str | None


def can_move(here: Where, there: Where) -> bool:
    """Whether a value that is here may be wanted there. A sum may have an addend that all have;
    rows that data choose are sent by exchanges alone."""
    if here == there:
        return True
    if isinstance(there, Chosen):
        return here is None
    if isinstance(here, Chosen):
        return there is None or there == SUM
    return here is None or there != SUM


def move_of(here: Where, there: Where) -> Callable[..., torch.Tensor]:
    """What brings a value from where it is to where it is wanted."""
    if here is None:
        return addend if there == SUM else own_rows if isinstance(there, Chosen) else part
    if isinstance(here, Chosen):
        return joined_rows if there is None else placed_rows
    if here == SUM:
        return all_reduce if there is None else reduce_scatter
    return all_gather if there is None else all_to_all
