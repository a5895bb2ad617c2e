"""What several families build with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from coverage_models.example import Example

WORDS = 50  # of every vocabulary


def words(rows: int, size: int) -> torch.Tensor:
    return torch.randint(3, WORDS, (rows, size))


def image(channels: int = 3) -> Callable[[int, int], tuple[torch.Tensor]]:
    return lambda rows, size: (torch.randn(rows, channels, size, size),)


def square(value: Any) -> torch.Tensor:
    """A loss for whatever a model returns: the mean square of its floating tensors, added up."""
    tensors = [one for one in _tensors(value) if one.is_floating_point() and one.requires_grad]
    return torch.stack([one.square().mean() for one in tensors]).sum()


def squared(model: nn.Module, draw: Callable[[int, int], tuple[Any, ...]], **more: Any) -> Example:
    """A model whose loss is the mean square of what it returns."""
    return Example(model, lambda *args: square(model(*args)), draw, **more)


def classified(
    model: nn.Module,
    draw: Callable[[int, int], tuple[Any, ...]],
    classes: int = 5,
    read: Callable[[Any], torch.Tensor] = lambda result: result,
    **more: Any,
) -> Example:
    """A model whose loss is the cross-entropy of its logits."""

    def step(*args: Any) -> torch.Tensor:
        *inputs, label = args
        return nn.functional.cross_entropy(read(model(*inputs)), label)

    def labelled(rows: int, size: int) -> tuple[Any, ...]:
        return *draw(rows, size), torch.randint(classes, (rows,))

    return Example(model, step, labelled, **more)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [one for part in value for one in _tensors(part)]
    return []
