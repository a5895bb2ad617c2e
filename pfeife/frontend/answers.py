"""Questions for the values of tensors (`if mask.any()`) where a step is traced.

They get the answers that a run on real data had, and whether these hold for other data is traced:

    on real data        mask.any() is False          answers: [False]
    traced              `if mask.any()` gets False   flag = (mask.any() != False)

A flag is one more result of the step, 0.0 in every microbatch for which the answer is right.
"""

import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from pfeife.frontend.user_lines import calling_line

Value = bool | int | float
_QUESTIONS = {
    torch.Tensor.item,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
}


@attrs.frozen
class Answer:
    """What a tensor was, and the user's line that has asked for it."""

    value: Value
    line: str


class Asking(torch.overrides.TorchFunctionMode):
    """Notes the answers to a step's questions, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Answer] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _QUESTIONS:
            self.answers.append(Answer(found, calling_line()))
        return found


class Answering(torch.overrides.TorchFunctionMode):
    """Gives the answers again; `flags` say for each of them whether it is wrong."""

    def __init__(self, answers: Sequence[Answer]):
        super().__init__()
        self.answers, self.flags = answers, list[torch.Tensor]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in _QUESTIONS and self.answers:
            if len(self.flags) == len(self.answers):
                raise ValueError("the step asks for more values of tensors than on real data")
            value = self.answers[len(self.flags)].value
            self.flags.append(_differs(args[0].detach(), value))
            return value
        return func(*args, **(kwargs or {}))


def _differs(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """1.0 where a tensor of one element is another than a number, else 0.0."""
    wrong = tensor.isnan().logical_not() if math.isnan(value) else tensor.ne(value)
    return wrong.to(torch.float32).reshape(())
