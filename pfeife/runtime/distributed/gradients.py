"""What happens to gradients between a step and its optimizer, which sees one rank's part alone."""

import functools
import hashlib
import logging
import weakref
from collections.abc import Container, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import attrs
import torch

from pfeife.runtime.distributed.apart import why_not_apart
from pfeife.runtime.distributed.elsewhere import is_here
from pfeife.runtime.failure import Refusal

log = logging.getLogger("pfeife")

_LOOKED_AT = 32  # values of a gradient
_FEW = 8  # gradients of a program on a rank, and all once some were scaled


@attrs.frozen(eq=False)
class _Handed:
    """A gradient as autograd left it: which tensor, at which version, and some of its values."""

    parameter: weakref.ref[torch.Tensor]
    gradient: int
    version: int
    values: torch.Tensor | None

    def ratios(self, gradient: torch.Tensor) -> torch.Tensor:
        """What the values were multiplied by, where that can be told."""
        found = (
            gradient.flatten()[:0] if self.values is None else some_values(gradient) / self.values
        )
        return found[found.isfinite()]


def some_values(gradient: torch.Tensor) -> torch.Tensor:
    """Some values of a gradient, spread over it."""
    flat = gradient.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _LOOKED_AT)].clone()


def is_ours(hook: Any) -> bool:
    """Whether a parameter's hook is that of `Gradients`."""
    return (
        isinstance(hook, functools.partial)
        and getattr(hook.func, "__func__", None) is Gradients.note
    )


class Gradients:
    """Notices what scales the gradients of this rank between backward and optimizer.step().

    `owned` are the tensors that some rank trains, `absent` those that this one does not. What a
    script computes of the gradients of one rank alone scales those of every rank otherwise.
    """

    def __init__(self, owned: MutableMapping[torch.Tensor, Any], absent: Container[torch.Tensor]):
        self.owned, self.absent = owned, absent
        self.handed: dict[int, _Handed] = {}
        self.scaled = False  # whether anything has scaled gradients so far
        self.steps = 0  # of any optimizer since the ranks have last compared
        self.stepped: set[str] = set()  # those optimizers, with what they are set to
        self.settings: dict[int, list[str]] = {}  # of groups that ranks share, by a tensor's number
        self.factors: dict[int, tuple[float, float]] = {}  # and how exact they are
        self.warned: set[str] = set()
        self.tried: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Notes the gradients of what a program trains on this rank from now on."""
        for index, parameter in enumerate(parameters):
            look = functools.partial(self.note, look=index < _FEW)
            parameter.register_post_accumulate_grad_hook(look)

    def note(self, parameter: torch.Tensor, *, look: bool = False) -> None:
        """Called by autograd when a parameter's gradient is complete."""
        gradient = parameter.grad
        if is_here(gradient) and gradient.layout == torch.strided and gradient.numel():
            values = some_values(gradient) if look or self.scaled else None
            self.handed[id(parameter)] = _Handed(
                weakref.ref(parameter), id(gradient), gradient._version, values
            )

    def news(self) -> list[str]:
        """The optimizers that have stepped since the ranks have last compared, and the factors,
        a line each."""
        lines = [f"scaled {at} {factor} {near}" for at, (factor, near) in self.factors.items()]
        lines += [f"set {number} {_digest(texts)}" for number, texts in self.settings.items()]
        return [f"stepped {_digest(sorted(self.stepped))}", *lines] if self.stepped else lines

    def forget(self) -> None:
        """After the ranks have compared."""
        self.steps, self.factors, self.stepped, self.settings = 0, {}, set(), {}

    def compare_steps(self, told: Mapping[int, str], rank: int, ranks: int) -> None:
        """Warns where ranks have stepped other optimizers, by the digests that they have told.
        That is no error: an optimizer of each parameter, stepped when its gradient is there, is
        stepped where the parameter is."""
        mine = told.get(rank)
        others = [other for other in range(ranks) if told.get(other) != mine]
        if others:
            self._warn(
                "steps",
                f"rank {rank} has stepped {', '.join(sorted(self.stepped)) or 'no optimizer'} "
                f"since the last step, and ranks {others} others, or otherwise set: every rank "
                "trains a part of the model, so that all make the same steps",
            )

    def check_settings(self, told: Mapping[int, Sequence[Sequence[str]]]) -> None:
        """Raises Refusal where a group whose parameters several ranks step is set otherwise on
        some of them, by the digests that they have told."""
        found: dict[str, dict[int, str]] = {}
        for rank, lines in sorted(told.items()):
            for number, one in lines:
                found.setdefault(number, {})[rank] = one
        for number, digests in found.items():
            first, *rest = digests
            others = [rank for rank in rest if digests[rank] != digests[first]]
            if others:
                made = self.settings.get(int(number), ())
                mine = " and ".join(f"{one} {made.count(one)} times" for one in dict.fromkeys(made))
                raise Refusal(
                    f"an optimizer has stepped on ranks {others} with other settings than on rank "
                    f"{first}, or not as often (here as {mine or 'nothing'}): what changes its "
                    "param_groups, as a scheduler's step(), is called on every rank, and begin "
                    "again from the last checkpoint, for the optimizer has made that step"
                )

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes what an optimizer is about to step with, and refuses what cannot be right."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if isinstance(optimizer, torch.optim.LBFGS):
            self._check_whole(parameters)
        self._check_state(optimizer, parameters)
        self._check_apart(optimizer, parameters)
        for group in optimizer.param_groups:
            text = _described(optimizer, group)
            self.stepped.add(text)
            shared = self._shared(group["params"])
            if shared is not None and any(p.grad is not None for p in group["params"]):
                self.settings.setdefault(shared.number, []).append(text)
        found = self._factor(parameters)
        if found is not None:
            self.factors[self.steps] = found
        self.steps += 1

    def _check_whole(self, parameters: Iterable[torch.Tensor]) -> None:
        for owned in (self.owned[p] for p in parameters if p in self.owned):
            if len(owned.ranks) < owned.mesh.ranks or owned.replica is not None:
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
        known = (self.owned[p] for p in parameters if p in self.owned)
        return next((one for one in known if len(one.everywhere) < one.mesh.size), None)

    def _shared(self, parameters: Iterable[torch.Tensor]) -> Any:
        """The first of some parameters that several ranks train, these or others; else None."""
        known = [self.owned[p] for p in parameters if p in self.owned]
        several = len({rank for one in known for rank in one.everywhere}) > 1
        return known[0] if several else None

    def _check_state(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
    ) -> None:
        """State for the parameters of other ranks, and none for those of this one, is that of
        another rank's optimizer."""
        state = optimizer.state  # which may have more than parameters
        others = [p for p in parameters if p in state and p.grad is None and p in self.absent]
        others = [p for p in others if state[p]]
        if others and any(p.grad is not None and not state.get(p) for p in parameters):
            raise ValueError(
                f"the optimizer has state for {self.owned[others[0]].name}, which another rank "
                "trains, and none for parameters of this rank: load the whole "
                "optimizer.state_dict(), which every rank gives, on every rank"
            )

    def _factor(self, parameters: Sequence[torch.Tensor]) -> tuple[float, float] | None:
        """By what all gradients that are not as autograd left them were multiplied, and how
        exactly that is known; None where there are none, or not one factor for all."""
        tops, near = [], 0.0
        for parameter in parameters:
            handed, gradient = self.handed.get(id(parameter)), parameter.grad
            if handed is None or gradient is None or handed.parameter() is not parameter:
                continue
            if (id(gradient), gradient._version) == (handed.gradient, handed.version):
                continue
            self.scaled = True
            ratios = handed.ratios(gradient)
            if len(ratios):
                near = max(near, 4 * torch.finfo(ratios.dtype).eps)
                tops += [float(ratios.max()), float(ratios.min())]  # one factor for its elements
        if not tops or max(tops) - min(tops) > near * max(tops):
            return None
        return max(tops), near

    def _warn(self, kind: str, text: str) -> None:
        """Once for each kind."""
        if kind not in self.warned:
            log.warning(text)
        self.warned.add(kind)


def _described(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """An optimizer with what a group is set to, its numbers of Python's."""
    plain = int | float | str | tuple | None
    given = [f"{key}={value}" for key, value in group.items() if isinstance(value, plain)]
    return f"{type(optimizer).__name__}({', '.join(given)})"


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]


def compared(told: Mapping[int, Sequence[Sequence[str]]]) -> str:
    """What is wrong with the factors that ranks have told, "" if nothing."""
    found: dict[str, dict[int, float]] = {}
    most = 0.0
    for rank, lines in told.items():
        for at, factor, near in lines:
            found.setdefault(at, {})[rank] = float(factor)
            most = max(most, float(near))
    for factors in found.values():
        high = max(factors.values())
        if high - min(factors.values()) > most * high:
            shown = ", ".join(f"{factor:.6g} on rank {rank}" for rank, factor in factors.items())
            return (
                "between backward() and optimizer.step() the gradients were multiplied by "
                f"{shown}: by something that each rank has computed of its own gradients. Call "
                "pfeife.clip_grad_norm_(parameters, max_norm) on every rank instead, and begin "
                "again from the last checkpoint, for the optimizer has made that step"
            )
    return ""
