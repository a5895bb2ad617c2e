"""One model of the suite: a step, and what draws batches for it."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn


@attrs.frozen(eq=False)
class Example:
    """A model with a training step.

    `draw(rows, size)` gives the step's arguments, fresh at each call; `sizes` are the usual size
    and another one (the length of a sequence, the side of an image; twice the same where a model
    takes but one). A batch has `rows` rows for a microbatch. `in_dims` are as in `pfeife.compile`.
    `reference` builds what it is compared with, where that is not the same: eager updates the
    statistics of what is checkpointed twice, torch.compile and we do once.
    """

    model: nn.Module
    step: Callable[..., torch.Tensor]
    draw: Callable[[int, int], tuple[Any, ...]]
    sizes: tuple[int, int] = (8, 8)
    rows: int = 2
    in_dims: Any = 0
    reference: "Callable[[], Example] | None" = None
