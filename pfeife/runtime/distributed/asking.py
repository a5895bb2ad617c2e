"""What of some state is missing on a rank, and which ranks have it."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pfeife.runtime.distributed.by_hand import ByHand
from pfeife.runtime.distributed.foreign import Foreign
from pfeife.runtime.distributed.handed import Handed
from pfeife.runtime.distributed.kept import Kept
from pfeife.runtime.distributed.questions import Named

if TYPE_CHECKING:
    from pfeife.runtime.distributed.owned import Owned
    from pfeife.runtime.distributed.serving import Service


class Asking:
    """Asks, of each absent tensor, the first rank that trains it, of this one's own pipeline if
    there is one.

    `known` are the owners of all tensors, `foreign` those that are absent; `service` is that of
    the world, a new one after every failure; `kept` is what others may ask this one for, `by_hand`
    what the script has written to it; `handed` are copies that it was given of what is absent.
    """

    service: "Service"

    def __init__(self, known: Mapping[torch.Tensor, "Owned"], foreign: Foreign):
        self.known, self.foreign, self.kept = known, foreign, Kept()
        self.by_hand, self.handed = ByHand(known, foreign), Handed()

    def number(self, tensor: torch.Tensor) -> int:
        """That of a tensor that ranks train."""
        return self.known[tensor].number

    def is_missing(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is absent here, and nothing has been loaded into it since."""
        return self.foreign.lacks(tensor)

    def tensors(
        self, missing: Iterable[torch.Tensor], beside: Iterable[torch.Tensor] | None = None
    ) -> dict[int, torch.Tensor]:
        """The values of absent tensors by their numbers; `beside` are those that they are a model's
        with, all that ranks train unless given. Raises as `Service.tensors`."""
        by_data = bool(self.by_hand.by_data(beside))
        found: dict[int, torch.Tensor] = {}
        with self._asking():
            for rank, wanted in self._by_rank(missing).items():
                found |= self.service.tensors(rank, wanted, by_data)
        return found

    def values(self, missing: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of absent tensors, in their order. Raises as `Service.tensors`."""
        found = self.tensors(missing)
        return [found[self.number(one)] for one in missing]

    def states(self, named: Named, missing: Iterable[torch.Tensor]) -> dict[int, Any]:
        """An optimizer's state for absent tensors by their numbers. Raises as `Service.states`."""
        found: dict[int, Any] = {}
        with self._asking():
            for rank, wanted in self._by_rank(missing).items():
                found |= self.service.states(rank, named, tuple(wanted))
        return found

    def changed(self, tensors: Iterable[torch.Tensor]) -> None:
        """After some have changed, on whatever ranks."""
        self.handed.follow(self.number(one) for one in tensors if one in self.known)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        with self.service.script.asking():
            yield

    def _by_rank(self, tensors: Iterable[torch.Tensor]) -> dict[int, dict[int, torch.Tensor]]:
        found: dict[int, dict[int, torch.Tensor]] = {}  # a tied tensor once
        for one in tensors:
            owned = self.known[one]
            rank = owned.nearest(self.service.world.rank)
            found.setdefault(rank, {})[owned.number] = one
        return {rank: found[rank] for rank in sorted(found)}
