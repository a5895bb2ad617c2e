"""What happens around every optimizer's step, in its order: two hooks for all of it.

Optimizers step what has a gradient. Those that other ranks have are taken away meanwhile:

before      weight.grad values    bias.grad absent
step        weight.grad values    bias.grad None         no update, and no state
after       weight.grad values    bias.grad absent       for who reads norms, until zero_grad()
"""

import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pfeife._torch import is_absent
from pfeife.runtime.distributed.served.optimizers import Optimizers
from pfeife.runtime.distributed.state.copies import Copies
from pfeife.runtime.distributed.state.gradients import Gradients
from pfeife.runtime.distributed.state.owned import parameters_of

Hidden = Mapping[torch.Tensor, torch.Tensor]


class StepHooks:
    """Calls those who have to do with the steps of this process's optimizers."""

    def __init__(self, gradients: Gradients, optimizers: Optimizers, copies: Copies) -> None:
        self.gradients, self.optimizers, self.copies = gradients, optimizers, copies
        self.hidden: MutableMapping[Any, Hidden] = weakref.WeakKeyDictionary()  # by optimizers
        self.handles: list[Any] = []

    def install(self) -> None:
        """From now on every step is seen."""
        if not self.handles:
            self.handles.append(register_optimizer_step_pre_hook(self._before))
            self.handles.append(register_optimizer_step_post_hook(self._after))

    def end(self) -> None:
        """No step is seen any more."""
        while self.handles:
            self.handles.pop().remove()

    @torch.compiler.disable
    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        seen = self._hide(optimizer, args, kwargs)  # the others see what the step sees
        self.gradients.before(optimizer)  # refuses state that is let go of next
        self.optimizers.before(optimizer)
        return seen

    @torch.compiler.disable
    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # Before copies come: an error there must not leave gradients hidden.
        self._give_back(optimizer)
        self.copies.after(optimizer)
        self.optimizers.after(optimizer)  # the step is over, for those who ask for state, too

    def _hide(
        self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Takes gradients of other ranks away. Returns what the step gets instead of its arguments,
        of which the optimizer is one."""
        parameters = parameters_of(optimizer)
        self.hidden[optimizer] = self._hidden(parameters)

        def hiding(closure: Callable[[], Any]) -> Callable[[], Any]:
            """A closure whose backward leaves no such gradients behind."""

            def run() -> Any:
                loss = closure()
                self.gradients.check_whole(optimizer)  # the first call of a step may be in there
                self.hidden[optimizer] = self._hidden(parameters)
                return loss

            return run

        closures = (hiding(argument) if callable(argument) else argument for argument in args[1:2])
        named = {k: hiding(v) if k == "closure" and callable(v) else v for k, v in kwargs.items()}
        return (*args[:1], *closures, *args[2:]), named

    def _hidden(self, parameters: Sequence[torch.Tensor]) -> Hidden:
        self.gradients.check_here(parameters)
        hidden: dict[torch.Tensor, Any] = {p: p.grad for p in parameters if is_absent(p.grad)}
        for parameter in hidden:
            parameter.grad = None
        return hidden

    def _give_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the gradients of other ranks back."""
        for parameter, gradient in self.hidden.pop(optimizer, {}).items():
            if parameter.grad is None:
                parameter.grad = gradient
