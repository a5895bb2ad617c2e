"""What other ranks were given of this one's state, and whether it was written to unseen since."""

import threading
import weakref
from collections.abc import Iterable

import attrs
import torch

from pfeife.runtime.distributed.foreign import version_of
from pfeife.runtime.distributed.gradients import some_values
from pfeife.runtime.distributed.questions import as_bytes
from pfeife.runtime.failure import Refusal


@attrs.frozen(eq=False)
class _Given:
    """A tensor as it was when it was given: its version, and some of its values, since what is
    written by `.data` leaves no trace in the version. Where writes are `counted`, those that the
    version tells of are no matter of ours."""

    name: str
    tensor: weakref.ref[torch.Tensor]
    version: int
    values: torch.Tensor
    counted: bool

    def changed(self) -> bool:
        tensor = self.tensor()
        if tensor is None:
            return False
        if version_of(tensor) != self.version:
            return not self.counted
        return not torch.equal(as_bytes(self.values), as_bytes(some_values(tensor)))


class Givens:
    """The tensors that were given away since their last change that all ranks know of."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.given: dict[int, _Given] = {}

    def note(self, tensors: Iterable[tuple[str, torch.Tensor]], counted: bool) -> None:
        """Notes some, with their names, as they are when they are first given."""
        with self.lock:
            for name, one in tensors:
                known = self.given.get(id(one))
                if known is None or known.tensor() is not one or known.version != version_of(one):
                    values = some_values(one)
                    found = _Given(name, weakref.ref(one), version_of(one), values, counted)
                    self.given[id(one)] = found

    def check(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises Refusal for one that was written to since it was given."""
        with self.lock:
            known = {name: self.given.get(id(one)) for name, one in tensors}
        name = next((name for name, one in known.items() if one and one.changed()), "")
        if name:
            raise Refusal(f"{name} was written to by hand since it was asked for")

    def changed(self) -> str:
        """The name of the first that has changed since, "" if there is none; forgets them all."""
        with self.lock:
            given, self.given = self.given, {}
        return next((one.name for one in given.values() if one.changed()), "")
