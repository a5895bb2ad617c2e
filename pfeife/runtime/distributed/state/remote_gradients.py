"""Gradients that other ranks have: here they are shapes, of which norms can be asked for.

                 rank 0                rank 1
    weight.grad  values                absent          after a backward
    bias.grad    absent                values
    norms        |w|, |bias| told      |w| told, |b|   torch.nn.utils.clip_grad_norm_ is that of all
    mul_         values                nothing         each rank scales its own

Whatever reads a norm does so on every rank, in one order. The first norm that a rank asks for makes
all ranks tell one another those of their own gradients, each where it is in the script by then:

    script          clip(w)      clip(bias)       rank 1 asks for |w|, and waits
    rank 0          |w|, mul_    asks             until rank 0 asks, who has changed w

So they tell those of before any change as well, and how many changes there were: who asks and has
made none takes the first, and who has made as many the other. Each is then known until somebody
changes it, or reads it again.
"""

import weakref
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
        self.told: dict[float, dict[int, float | None]] = {}  # by order and number
        self.orders = {2.0}  # of which norms may be asked for
        self.first: dict[float, dict[int, torch.Tensor]] = {}  # own ones, before any change
        self.versions: dict[int, int] = {}  # of gradients then
        # Gradients of others that have been changed since, each time by which tensor.
        self.written: dict[int, list[weakref.ref]] = {}

    def begin(self) -> None:
        """After a backward: takes the norms of this rank's gradients before any is changed."""
        gradients = self._gradients()
        here = {n: g for n, g in gradients.items() if is_here(g) and g.layout == torch.strided}
        self.forget()
        self.versions = {number: gradient._version for number, gradient in gradients.items()}
        self.first = {
            order: {number: _norm(gradient, order) for number, gradient in here.items()}
            for order in self.orders
        }

    def take(self, number: int, order: float) -> float:
        """The norm of a gradient that another rank has, 0.0 if it has none; it is told once
        (collective if it is not told). Raises ValueError if its owner has changed it otherwise."""
        if number not in self.told.get(order, {}):
            # All of them at once: who asks for one, as clip_grad_norm_ does, asks for the others.
            self.told[order] = self._asked(order)
        norm = self.told[order].pop(number)
        if norm is None:
            owned = self.owned[number]
            raise ValueError(
                f"the norm of the gradient of {owned.name} is asked for on a rank that does not "
                f"train it, and rank {owned.first} has changed it since, or not yet as often, or "
                "has another one in its place (changes of its data are not counted): read the "
                "norms of all gradients before any is changed, or clip by pfeife.clip_grad_norm_, "
                "which ranks do together"
            )
        return norm

    def change(self, number: int, tensor: torch.Tensor) -> None:
        """A gradient that another rank has has been changed, on every rank, by a tensor."""
        self.written.setdefault(number, []).append(weakref.ref(tensor))
        for norms in self.told.values():
            norms.pop(number, None)

    def forget(self) -> None:
        """Gradients are others than before."""
        for known in (self.told, self.first, self.versions, self.written):
            known.clear()

    def _gradients(self) -> dict[int, torch.Tensor]:
        """Those of tensors that not all ranks train, by their numbers."""
        # A deep copy that the ranks have not numbered together yet is not among the owned.
        return {
            owned.number: tensor.grad
            for tensor, owned in self.owners.items()
            if owned.number in self.owned and tensor.grad is not None and owned.is_divided
        }

    def _is_first(self, number: int, gradient: torch.Tensor) -> bool:
        """Whether a gradient of this rank is as it was after the backward, or seems so: writes to
        its `data` count no version, but its norm of order 2 is another one."""
        if gradient._version != self.versions.get(number, gradient._version):
            return False
        first = self.first.get(2.0, {}).get(number)
        now = _norm(gradient, 2.0)
        return first is None or torch.allclose(first, now, rtol=0.0, atol=0.0, equal_nan=True)

    def _asked(self, order: float) -> dict[int, float | None]:
        world = self.world
        assert world is not None
        self.orders.add(order)
        with world.busy(lambda: Activity(_PLACE)):
            world.agreed(f"the norm of order {order}", _PLACE)
            # Of each a norm before any change, whether that is known, one now, how many changes.
            told = torch.zeros(len(self.owned), 4, dtype=torch.float64, device=world.device)
            told[:, 1] = 1
            gradients = self._gradients()
            for number, gradient in gradients.items():
                changes = gradient._version - self.versions.get(number, gradient._version)
                told[number, 3] = changes
                if is_here(gradient):
                    now, first = _norm(gradient, order), self.first.get(order, {}).get(number)
                    told[number, 0], told[number, 2] = now if first is None else first, now
                    told[number, 1] = first is not None or self._is_first(number, gradient)
            every = [each.tolist() for each in world.gather(told)]
        own = told.tolist()
        moved = {number for number, gradient in gradients.items() if not _is_of(gradient, number)}
        by_number: dict[int, float | None] = {}
        for number, owned in self.owned.items():
            first, is_known, now, changes = every[owned.first][number]
            norm = now if number in self.written else first
            # Writes to `data` count no version, so nobody knows how many an owner has done.
            writers = self.written.get(number, ())
            others = sum(writer() is not gradients.get(number) for writer in writers)
            counted = changes == own[number][3] >= others
            is_same = counted if number in self.written else is_known
            by_number[number] = norm if is_same and number not in moved else None
        return by_number


def _is_of(gradient: torch.Tensor, number: int) -> bool:
    """Whether a gradient is that of a parameter, and not one that a script has put in its place."""
    if is_here(gradient):
        return True
    owned = getattr(_torch.record_of(gradient), "owned", None)
    return owned is not None and owned.number == number


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
        self.norms.change(self.owned.number, tensor)

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
    """In a backward: what other ranks have got for some parameters has its shapes here."""
    norms.forget()
    _torch.after_backward(norms.begin)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = gradient_of(parameter, norms)
        if is_absent(parameter.grad):
            _torch.record_of(parameter.grad).overflow |= overflow
