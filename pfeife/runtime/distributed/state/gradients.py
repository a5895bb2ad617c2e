"""What happens to gradients between a step and its optimizer, which sees one rank's part alone."""

import logging
import weakref
from collections.abc import Container, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from pfeife._torch import is_absent
from pfeife.runtime.distributed.state.optimizer_probe import why_not_apart
from pfeife.runtime.distributed.state.owned import parameters_of
from pfeife.runtime.failure import CollectiveError

log = logging.getLogger("pfeife")


class Gradients:
    """What this rank's optimizers do, each of which sees one rank's part alone. `owned` are the
    tensors that some rank trains, `absent` those that this one does not."""

    def __init__(self, owned: MutableMapping[torch.Tensor, Any], absent: Container[torch.Tensor]):
        self.owned, self.absent = owned, absent
        # The optimizers that stepped since the ranks have last compared, with their settings.
        self.stepped: set[str] = set()
        self.settings: dict[int, list[str]] = {}  # of groups that ranks share, by a tensor's number
        self.warned: list[str] = []  # once
        self.tried: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def forget(self) -> None:
        """After the ranks have compared."""
        self.stepped.clear()
        self.settings.clear()

    def compare_steps(self, digests: Sequence[str], rank: int) -> None:
        """Warns where ranks have stepped other optimizers than this `rank`, by the digests of each.
        That is no error: an optimizer of each parameter, stepped when its gradient is there, is
        stepped where the parameter is."""
        differing = [peer for peer, digest in enumerate(digests) if digest != digests[rank]]
        if differing and not self.warned:
            self.warned.append(
                f"rank {rank} has stepped {', '.join(sorted(self.stepped)) or 'no optimizer'} "
                f"since the last step, and ranks {differing} others, or otherwise set: every rank "
                "trains a part of the model, so that all make the same steps"
            )
            log.warning(self.warned[0])

    def check_settings(self, by_rank: Sequence[Iterable[tuple[int, str]]]) -> None:
        """Raises CollectiveError where a group whose parameters several ranks step is set otherwise
        on some of them, by the numbers and digests that each has told."""
        by_number: dict[int, dict[int, str]] = {}
        for rank, settings in enumerate(by_rank):
            for number, digest in settings:
                by_number.setdefault(number, {})[rank] = digest
        for number, digests in by_number.items():
            first, *rest = digests
            differing = [rank for rank in rest if digests[rank] != digests[first]]
            if differing:
                made = self.settings.get(number, ())
                here = " and ".join(
                    f"{setting} {made.count(setting)} times" for setting in dict.fromkeys(made)
                )
                raise CollectiveError(
                    f"an optimizer has stepped on ranks {differing} with other settings than on "
                    f"rank {first}, or not as often (here as {here or 'nothing'}): what changes "
                    "its param_groups, as a scheduler's step(), is called on every rank, and begin "
                    "again from the last checkpoint, for the optimizer has made that step"
                )

    def check_here(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raises ValueError for a parameter that this rank trains, and whose gradient is absent."""
        for parameter in filter(self.owned.__contains__, parameters):
            if parameter not in self.absent and is_absent(parameter.grad):
                raise ValueError(
                    f"the gradient of {self.owned[parameter].name}, which this rank trains, has no "
                    "values here: the script has written to it what other ranks have, their "
                    "gradients or parameters. Compute that in the step, as a term of the loss"
                )

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes what an optimizer is about to step with, and refuses what cannot be right."""
        parameters = parameters_of(optimizer)
        self.check_whole(optimizer)
        self._check_state(optimizer, parameters)
        self._check_apart(optimizer, parameters)
        for group in optimizer.param_groups:
            text = _described(optimizer, group)
            if any(parameter in self.owned for parameter in group["params"]):
                self.stepped.add(text)
            # Schedulers set groups, so a rank that leaves one out shows in what it steps with.
            shared = self._shared(group["params"])
            # Without a gradient here nothing of the group is stepped: nothing to compare.
            if shared is not None and any(p.grad is not None for p in group["params"]):
                self.settings.setdefault(shared.number, []).append(text)

    def check_whole(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ValueError for an optimizer that needs all gradients at once, if some are not
        here."""
        if not isinstance(optimizer, torch.optim.LBFGS):
            return
        for owned in (self.owned[p] for p in parameters_of(optimizer) if p in self.owned):
            if owned.is_divided:
                raise ValueError(
                    f"torch.optim.LBFGS needs all gradients in one process, but {owned.name} is "
                    f"trained on ranks {list(owned.everywhere)} of {owned.mesh.size}: use an "
                    "optimizer that takes parameters one by one, or as many replicas= as there are "
                    "ranks, and data_parallel='average'"
                )

    def _check_apart(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
    ) -> None:
        if optimizer in self.tried:
            return
        divided = self._divided(parameters)
        if divided is None:
            return
        # Once: the trial steps a copy several times.
        self.tried.add(optimizer)
        why = why_not_apart(optimizer)
        if why:
            raise ValueError(
                f"{type(optimizer).__name__}.step() {why}: this rank steps the parameters that it "
                f"trains alone ({divided.name} is trained on ranks {list(divided.everywhere)} of "
                f"{divided.mesh.size}), so that it would do something else than on one device. "
                "Compute that before the step (torch.nn.utils.clip_grad_norm_ has the norm of all "
                "gradients), take an optimizer that takes parameters one by one, or as many "
                "replicas= as there are ranks, and data_parallel='average'"
            )

    def _divided(self, parameters: Iterable[torch.Tensor]) -> Any:
        """The first of some parameters that not all ranks train, None if all do."""
        trained = (self.owned[p] for p in parameters if p in self.owned)
        return next((owned for owned in trained if owned.is_divided), None)

    def _shared(self, parameters: Iterable[torch.Tensor]) -> Any:
        """The first of some parameters that several ranks train, these or others; else None."""
        trained = [self.owned[p] for p in parameters if p in self.owned]
        several = len({rank for owned in trained for rank in owned.everywhere}) > 1
        return trained[0] if several else None

    def _check_state(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
    ) -> None:
        """State for the parameters of other ranks, and none for those of this one, is that of
        another rank's optimizer."""
        state = optimizer.state  # which may have more than parameters
        foreign = [p for p in parameters if p in state and p.grad is None and p in self.absent]
        foreign = [p for p in foreign if state[p]]
        if foreign and any(p.grad is not None and not state.get(p) for p in parameters):
            raise ValueError(
                f"the optimizer has state for {self.owned[foreign[0]].name}, which another rank "
                "trains, and none for parameters of this rank: load the whole "
                "optimizer.state_dict(), which every rank gives, on every rank"
            )


def _described(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """An optimizer with what a group is set to, its numbers of Python's."""
    plain = int | float | str | tuple | None
    settings = [f"{key}={value}" for key, value in group.items() if isinstance(value, plain)]
    return f"{type(optimizer).__name__}({', '.join(settings)})"
