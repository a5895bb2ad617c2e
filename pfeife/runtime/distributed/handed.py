"""Copies of what other ranks train that `state_dict()` has handed to this rank's script.

On one device these are no copies, and go on changing with the model. Where a script keeps such a
dict, a part of it would go on and the rest would not; so copies follow what they are of:

    best = model.state_dict()    0.weight: itself         1.weight: what rank 1 has now
    optimizer.step()             0.weight has changed     1.weight is NaN, as in the model
"""

import weakref
from collections.abc import Callable, Iterable

import attrs
import torch

from pfeife import _torch
from pfeife.runtime.distributed.foreign import version_of

_Memory = Callable[[], torch.Tensor | None]  # what looks at a copy's, None when nobody else does


@attrs.frozen(eq=False)
class _Copy:
    memory: _Memory
    tensor: weakref.ref[torch.Tensor]
    version: int

    def follow(self) -> None:
        """Takes the values that the tensor has now."""
        tensor, copy = self.tensor(), self.memory()
        if tensor is not None and copy is not None:
            copy.copy_(tensor.detach())

    @property
    def is_behind(self) -> bool:
        tensor = self.tensor()
        return tensor is not None and version_of(tensor) != self.version


class Handed:
    """The copies of absent tensors, and of what optimizers keep for these, by their numbers. Those
    on other devices than the tensors stay as they are: there `.cpu()` copies on one device too."""

    def __init__(self) -> None:
        self.values: dict[int, list[_Copy]] = {}
        self.states: dict[int, list[_Memory]] = {}

    def note_value(self, number: int, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """Notes a copy of an absent tensor."""
        if copy.device == tensor.device:
            alive = [one for one in self.values.get(number, ()) if one.memory() is not None]
            found = _Copy(_torch.memory_of(copy), weakref.ref(tensor), version_of(tensor))
            self.values[number] = [*alive, found]

    def note_states(
        self, number: int, tensor: torch.Tensor, copies: Iterable[torch.Tensor]
    ) -> None:
        """Notes copies of what an optimizer keeps for an absent tensor."""
        mine = [_torch.memory_of(one) for one in copies if one.device == tensor.device]
        alive = [one for one in self.states.get(number, ()) if one() is not None]
        self.states[number] = [*alive, *mine]

    def follow(self, changed: Iterable[int] = ()) -> None:
        """After a change: copies of what has `changed`, by number, and of what this rank's script
        has written to."""
        if self.values:
            listed = list(self.values.items())  # other threads may ask for state meanwhile
            behind = {n for n, copies in listed if any(one.is_behind for one in copies)}
            for number in {*changed, *behind}:
                for one in self.values.pop(number, ()):
                    one.follow()

    def stepped(self, changed: Iterable[int]) -> None:
        """After a step of an optimizer: copies of what it has, and of its state."""
        if self.values or self.states:
            numbers = set(changed)
            self.follow(numbers)
            for number in numbers:
                for memory in self.states.pop(number, ()):
                    copy = memory()
                    if copy is not None:
                        blank(copy)


def blank(tensor: torch.Tensor) -> None:
    """NaN, or the least integer, instead of values, in their own memory."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype.is_signed:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
