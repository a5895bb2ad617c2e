"""Gradients that other ranks have: here they are shapes, of which norms can be asked for.

                 rank 0                rank 1
    weight.grad  values                absent          after a backward
    bias.grad    absent                values
    norms        |w|, |bias| told      |w| told, |b|   torch.nn.utils.clip_grad_norm_ is that of all
    mul_         values                nothing         each rank scales its own

Whatever reads a norm does so on every rank, in one order. The first norm that a rank asks for makes
all ranks tell one another those of their own gradients; each of the others is then known until
somebody changes it, or reads it again.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import attrs
import torch

from pfeife import _torch
from pfeife._torch import is_absent
from pfeife.frontend.deferred.remote_batch import Absence, absent
from pfeife.runtime.distributed.control.peers import Peers
from pfeife.runtime.distributed.liveness.heartbeat import Activity

_PLACE = (
    "a norm of gradients (torch.nn.utils.clip_grad_norm_; where one rank trains all of these "
    "parameters: pfeife.clip_grad_norm_)"
)


class Norms:
    """The norms of the gradients of all ranks. `owners` are the tensors that some rank trains with
    their owners, `owned` these by their numbers, the same on every rank."""

    def __init__(self, owners: Mapping[torch.Tensor, Any], owned: Mapping[int, Any]):
        self.owners, self.owned = owners, owned
        self.world: Peers | None = None  # the latest
        self.told: dict[float, dict[int, float]] = {}  # by order and number

    def take(self, number: int, order: float) -> float:
        """The norm of a gradient that another rank has, 0.0 if it has none; it is told once
        (collective if it is not told)."""
        if number not in self.told.get(order, {}):
            # All of them at once: who asks for one, as clip_grad_norm_ does, asks for the others.
            self.told[order] = self._asked(order)
        return self.told[order].pop(number)

    def forget(self, number: int | None = None) -> None:
        """A gradient has been changed, on every rank; all of them without its number."""
        for norms in self.told.values():
            norms.clear() if number is None else norms.pop(number, None)

    def _asked(self, order: float) -> dict[int, float]:
        world = self.world
        assert world is not None
        with world.busy(lambda: Activity(_PLACE)):
            world.agreed(f"the norm of order {order}", _PLACE)
            norms = torch.zeros(len(self.owned), dtype=torch.float64, device=world.device)
            for tensor, owned in self.owners.items():
                # A deep copy that the ranks have not numbered together yet is not among the owned.
                if owned.number in self.owned and is_here(tensor.grad):
                    norms[owned.number] = _norm(tensor.grad, order)
            gathered = world.gather(norms)
        return {n: float(gathered[owned.first][n]) for n, owned in self.owned.items()}


def _norm(gradient: torch.Tensor, order: float) -> torch.Tensor:
    values = gradient.detach()
    if values.layout != torch.strided:
        values = values.coalesce().values()
    norm: torch.Tensor = torch.linalg.vector_norm(values, order)
    return norm


@attrs.define(eq=False)
class RemoteGradient(Absence):
    """Why a gradient of a parameter that other ranks train, or what was `computed` of it, has no
    values. Its norms are those that its owner has, if it is the `size` numbers of the whole."""

    owned: Any  # its parameter's `Owned`
    norms: Norms
    size: int
    computed: bool = False
    overflow: bool = False  # whether any rank has a gradient that is not finite

    def refusal(self, what: str) -> ValueError:
        """Says what may be read of such a gradient."""
        return ValueError(
            f"{what} reads the gradient of {self.owned.name}, which another rank trains: of such a "
            "gradient there are norms here (torch.linalg.vector_norm, clip_grad_norm_), and what "
            "computes or changes each of its elements is done where it is; read other things of "
            "gradients on the ranks that have them"
        )

    def derived(self) -> "RemoteGradient":
        """That of what is computed of it, whose norm nobody has been told."""
        return attrs.evolve(self, computed=True)

    def written(self, tensor: torch.Tensor) -> None:
        """On every rank, and so may be what it is a view of."""
        self.norms.forget(self.owned.number)

    def loaded(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """A gradient that is given values stays absent: each rank gives its own."""
        if self.computed:
            super().loaded(tensor, values)
        else:
            self.written(tensor)

    def norm(self, tensor: torch.Tensor, order: float) -> float:
        """Its owner's (collective, see `Norms.take`). Raises ValueError for that of a part."""
        if self.computed or tensor.numel() != self.size:
            raise self.refusal("a norm of what was computed of it, or of a part,")
        return self.norms.take(self.owned.number, order)


def is_here(gradient: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether there is a gradient with values."""
    return gradient is not None and not is_absent(gradient)


def gradient_of(parameter: torch.Tensor, norms: Norms, computed: bool = False) -> torch.Tensor:
    """That of a parameter that other ranks train."""
    # The gradient of a parameter may be of another dtype than the parameter.
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype  # of newer torch
    like = _torch.as_meta(parameter).to(dtype)
    owned = norms.owners[parameter]
    return absent(like, parameter.device, RemoteGradient(owned, norms, like.numel(), computed))


def arrived(parameters: Iterable[torch.Tensor], norms: Norms, overflow: bool) -> None:
    """After a backward: what other ranks have got for some parameters has its shapes here."""
    norms.forget()
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = gradient_of(parameter, norms)
        if is_absent(parameter.grad):
            _torch.record_of(parameter.grad).overflow |= overflow
