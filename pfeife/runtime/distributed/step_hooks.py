"""What happens around every optimizer's step, in its order: two hooks for all of it."""

from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pfeife.runtime.distributed.copies import Copies
from pfeife.runtime.distributed.gradients import Gradients
from pfeife.runtime.distributed.optimizers import Optimizers
from pfeife.runtime.distributed.stepping import Stepping


class StepHooks:
    """Calls those who have to do with the steps of this process's optimizers."""

    def __init__(
        self, stepping: Stepping, gradients: Gradients, optimizers: Optimizers, copies: Copies
    ) -> None:
        self.stepping, self.gradients = stepping, gradients
        self.optimizers, self.copies = optimizers, copies
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
        seen = self.stepping.before(optimizer, args, kwargs)  # the others see what the step sees
        self.gradients.before(optimizer)  # refuses state that is let go of next
        self.optimizers.before(optimizer)
        return seen

    @torch.compiler.disable
    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.stepping.after(optimizer)
        self.copies.after(optimizer)
        self.optimizers.after(optimizer)  # the step is over, for those who ask for state, too
