"""A small net of any form: skips, tied weights, updated buffers, sizes that data decide."""

from collections.abc import Sequence

import attrs
import torch
from torch import nn


@attrs.frozen
class Layer:
    """One operation of a `RandomNet`: what it is and which earlier values it reads."""

    operation: str
    first: int
    second: int


STATIC = ("linear", "tied", "relu", "add", "mul", "norm", "batch_norm", "swap", "halves", "number")
OPERATIONS = (*STATIC, "rows", "count")


class RandomNet(nn.Module):
    """A net of drawn operations on values of one shape; the last ones are summed up.

    "tied" uses the weight of the net's first "linear" again, transposed. In "number", "rows" and
    "count" data decide a number, how many rows are taken, and by how many is divided.
    """

    width = 4

    def __init__(self, layers: Sequence[Layer]):
        super().__init__()
        self.layers = tuple(layers)
        self.shared = nn.Linear(self.width, self.width)
        made = {"linear": nn.Linear, "norm": nn.LayerNorm, "batch_norm": nn.BatchNorm1d}
        self.modules_of = nn.ModuleDict()
        for index, layer in enumerate(layers):
            if layer.operation in made:
                # A linear layer has two sizes, a norm one; all values have one shape, so any may
                # follow any.
                sizes = (self.width,) * (2 if layer.operation == "linear" else 1)
                self.modules_of[str(index)] = made[layer.operation](*sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the last value and one of the middle, for rows of `width` features."""
        values = [x]
        for index, layer in enumerate(self.layers):
            first, second = values[layer.first], values[layer.second]
            values.append(self._run(index, layer.operation, first, second))
        # The second term is a skip connection, over half of the net: plans send it past stages.
        return self.shared(values[-1]) + values[len(values) // 2]

    def _run(
        self, index: int, operation: str, first: torch.Tensor, second: torch.Tensor
    ) -> torch.Tensor:
        if str(index) in self.modules_of:
            return self.modules_of[str(index)](first)
        if operation == "tied":
            return first @ self.shared.weight
        if operation == "relu":
            return first.relu()
        if operation == "add":
            return first + second
        if operation == "mul":
            return first * second.tanh()
        if operation == "swap":
            return first.flip(1)
        if operation == "number":
            return first * second.mean().tanh().item()
        if operation in ("rows", "count"):
            (chosen,) = (second[:, 0] > 0).nonzero(as_tuple=True)
            parts = first[chosen] if operation == "rows" else first[chosen] / (1 + len(chosen))
            return first.index_add(0, chosen, parts)
        left, right = first.chunk(2, dim=1)
        return torch.cat([right, left + second[:, :2]], dim=1)
