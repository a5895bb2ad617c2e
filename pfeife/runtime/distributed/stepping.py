"""Optimizers step what has a gradient: they do not see those that other ranks have."""

import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch

from pfeife._torch import is_absent

Hidden = Mapping[torch.Tensor, torch.Tensor]


class Stepping:
    """Takes the gradients of other ranks away while any optimizer of this process steps.

    before      weight.grad values    bias.grad absent
    step        weight.grad values    bias.grad None         no update, and no state
    after       weight.grad values    bias.grad absent       for who reads norms, until zero_grad()
    """

    def __init__(self) -> None:
        self.hidden: MutableMapping[Any, Hidden] = weakref.WeakKeyDictionary()  # by optimizers

    def before(
        self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Returns what the step gets instead of its arguments, of which the optimizer is one."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.hidden[optimizer] = _hidden(parameters)

        def hiding(closure: Callable[[], Any]) -> Callable[[], Any]:
            """A closure whose backward leaves no such gradients behind."""

            def run() -> Any:
                found = closure()
                self.hidden[optimizer] = _hidden(parameters)
                return found

            return run

        closures = (hiding(one) if callable(one) else one for one in args[1:2])
        named = {k: hiding(v) if k == "closure" and callable(v) else v for k, v in kwargs.items()}
        return (*args[:1], *closures, *args[2:]), named

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives them back."""
        for parameter, gradient in self.hidden.pop(optimizer, {}).items():
            if parameter.grad is None:
                parameter.grad = gradient


def _hidden(parameters: Iterable[torch.Tensor]) -> Hidden:
    found: dict[torch.Tensor, Any] = {p: p.grad for p in parameters if is_absent(p.grad)}
    for parameter in found:
        parameter.grad = None
    return found
