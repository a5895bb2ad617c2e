"""What of some state is missing on a rank, and which ranks have it."""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pfeife.runtime.distributed.control.questions import Named
from pfeife.runtime.distributed.served.state_server import Service
from pfeife.runtime.distributed.served.writes import A_COPY, BY_DATA, STATE_BY_HAND, Writes
from pfeife.runtime.distributed.state.owned import Owned
from pfeife.runtime.distributed.state.remote_parameters import Foreign


class Asking:
    """Asks, of each absent tensor, the first rank that trains it, of this one's own pipeline if
    there is one.

    `owners` are those of all tensors, `foreign` those that are absent; `service` is that of
    the world, a new one after every failure; `writes` counts what the script writes by hand,
    `numbered` are the tensors by their numbers.
    """

    service: Service

    def __init__(self, owners: Mapping[torch.Tensor, Owned], foreign: Foreign):
        self.owners, self.foreign = owners, foreign
        self.writes = Writes(owners, foreign)
        self.numbered: weakref.WeakValueDictionary[int, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )
        self.kept: list[Any] = []

    def number(self, tensor: torch.Tensor) -> int:
        """That of a tensor that ranks train."""
        return self.owners[tensor].number

    def is_missing(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is absent here, and nothing has been loaded into it since."""
        return self.foreign.lacks(tensor)

    def is_asked_for(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether a rank, this one or another, lacks any of some tensors that ranks train."""
        owned_tensors = (self.owners[tensor] for tensor in tensors if tensor in self.owners)
        return any(owned.is_divided for owned in owned_tensors)

    def tensors(self, missing: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The values of absent tensors by their numbers. A rank that is `missing` none counts as
        asking, too: others may ask it at this point. Raises as `Service.tensors`."""
        values: dict[int, torch.Tensor] = {}
        # Also where nothing is missing: a rank that has all of a model would go on otherwise, and
        # change what others are about to ask it for.
        with self.service.script.asking():
            for rank, wanted in self._by_rank(missing).items():
                # From now on until the next change: a write by `.data` that comes after the answer
                # would make it one of another moment, without a count that says so.
                pairs = self._parts(wanted, "")
                self.service.late.watch(BY_DATA, pairs, self.foreign.data_writes)
                values |= self.service.tensors(rank, wanted)
        return values

    def states(
        self,
        named: Named,
        missing: Iterable[torch.Tensor],
        here: Mapping[int, Any],
    ) -> dict[int, Any]:
        """An optimizer's state for absent tensors by their numbers; `here` is that of the others.
        Raises as `Service.states`."""
        self.service.late.watch(STATE_BY_HAND, self._parts(here, "the state of "))
        states: dict[int, Any] = {}
        with self.service.script.asking():
            for rank, wanted in self._by_rank(missing).items():
                states |= self.service.states(rank, named, tuple(wanted))
        return states

    def watch_copies(self, values: Mapping[int, Any], of: str = "") -> None:
        """Watches what the script was given, by the numbers of tensors, the values of these or
        something `of` them: on one device who writes to it changes the model."""
        self.service.copies.watch(A_COPY, self._parts(values, of))

    def _parts(self, values: Mapping[int, Any], of: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors in values by the numbers of tensors, with the names of these."""
        names = {owned.number: f"{of}{owned.name}" for owned in self.owners.values()}
        for number, value in values.items():
            for part in pytree.tree_leaves(value):
                if isinstance(part, torch.Tensor):
                    yield names[number], part

    def keep(self, value: Any) -> None:
        """Keeps a tensor or an optimizer, which other ranks may still ask for when the script has
        dropped it, until all ranks have come together."""
        self.kept.append(value)

    def renew(self) -> None:
        """Lets go of what nobody else has any more; the ranks are at one place."""
        # Only what somebody else keeps alive is kept until the ranks come together again.
        references = [weakref.ref(value) for value in self.kept]
        self.kept.clear()
        self.kept.extend(value for reference in references if (value := reference()) is not None)

    def _by_rank(self, tensors: Iterable[torch.Tensor]) -> dict[int, dict[int, torch.Tensor]]:
        by_rank: dict[int, dict[int, torch.Tensor]] = {}  # a tied tensor once
        for tensor in tensors:
            owned = self.owners[tensor]
            rank = owned.nearest(self.service.world.rank)
            by_rank.setdefault(rank, {})[owned.number] = tensor
        return {rank: by_rank[rank] for rank in sorted(by_rank)}
