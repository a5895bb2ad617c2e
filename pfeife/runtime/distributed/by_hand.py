"""What a script has written to state by itself since the last change that all ranks know of.

                       rank 0, which asks      rank 1, which trains 1.weight
    optimizer.step()   1.weight    0 writes    1.weight    0 writes
    1.weight.mul_(.9)              1                       0           not yet: rank 0 waits for it
    state_dict()                   1                       1           the same point: it answers

Autograd counts what is written to a tensor, also to one that is absent. What is written to
`tensor.data` leaves no trace there: some values of this rank's own tensors tell of that.
"""

import weakref
from collections.abc import Container, Iterable, Mapping
from typing import Any

import attrs
import torch

from pfeife._torch import is_absent
from pfeife.runtime.distributed.foreign import version_of
from pfeife.runtime.distributed.questions import as_bytes

_LOOKED_AT = 8  # values of a tensor


@attrs.define(eq=False)
class _Mark:
    """A tensor at the last change: its version, where it was, and, of one that this rank has, a
    look at some of its values beside what they were."""

    tensor: weakref.ref[torch.Tensor]
    version: int = 0
    place: int = 0
    look: torch.Tensor | None = None
    seen: torch.Tensor | None = None

    def is_written(self) -> bool:
        """Whether it has other values now, of which its version does not tell."""
        tensor = self.tensor()
        if tensor is None or version_of(tensor) != self.version:
            return False
        if self.look is None or self.seen is None:
            return False
        moved = tensor.data_ptr() != self.place
        return moved or not torch.equal(as_bytes(self.look.contiguous()), as_bytes(self.seen))


class ByHand:
    """Counts what is written to the tensors that ranks train (`known`, with their owners) between
    two changes; `absent` are those that this rank has no values of."""

    def __init__(self, known: Mapping[torch.Tensor, Any], absent: Container[torch.Tensor]):
        self.known, self.absent = known, absent
        self.marks: dict[int, _Mark] = {}  # by id

    def note(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """After a change of some tensors, all unless given: counts from zero."""
        if tensors is None:
            tensors = list(self.known)
            kept = set(map(id, tensors))
            self.marks = {one: mark for one, mark in self.marks.items() if one in kept}
        looks, seen = list[torch.Tensor](), list[torch.Tensor]()
        with torch.inference_mode(False), torch.no_grad():
            for one in tensors:
                mark = self._marked(one)
                if mark.look is not None and mark.seen is not None:
                    looks.append(mark.look)
                    seen.append(mark.seen)
            if looks:
                torch._foreach_copy_(seen, looks)

    def _marked(self, tensor: torch.Tensor) -> _Mark:
        mark = self.marks.get(id(tensor))
        if mark is None or mark.tensor() is not tensor:
            mark = self.marks[id(tensor)] = _Mark(weakref.ref(tensor))
        mark.version = version_of(tensor)
        if is_absent(tensor):
            mark.place, mark.look, mark.seen = 0, None, None
        elif tensor.data_ptr() != mark.place:
            mark.place = tensor.data_ptr()
            mark.look = _look(tensor)
            mark.seen = None if mark.look is None else torch.empty_like(mark.look)
        return mark

    def counts(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        """How often each of some tensors was written to."""
        marks = ((one, self.marks.get(id(one))) for one in tensors)
        return tuple(version_of(one) - mark.version if mark else 0 for one, mark in marks)

    def here(self) -> list[tuple[str, torch.Tensor]]:
        """What this rank has values of, with names."""
        return [(owned.name, one) for one, owned in self.known.items() if one not in self.absent]

    def by_data(self, tensors: Iterable[torch.Tensor] | None = None) -> str:
        """The name of one among some tensors, all unless given, that was written to by its `data`;
        "" if there is none."""
        every = list(self.known) if tensors is None else tensors
        marks = ((one, self.marks.get(id(one))) for one in every)
        written = (self.known[one].name for one, mark in marks if mark and mark.is_written())
        return next(written, "")


def _look(tensor: torch.Tensor) -> torch.Tensor | None:
    """A view of some values, spread over a tensor that is contiguous."""
    if tensor.layout != torch.strided:
        return None
    count = min(tensor.numel(), _LOOKED_AT if tensor.is_contiguous() else 1)
    return tensor.data.as_strided((count,), (max(1, tensor.numel() // _LOOKED_AT),))
