"""Deep copies of modules with state that ranks train: each is where what it was copied of is.

              rank 0     rank 1
    model.0   trained    absent     Owned(0, ranks=(0,))
    best.0    values     absent     Owned(-3, ranks=(0,)), at the next call Owned(2, ranks=(0,))

Until all ranks have come together a copy has a number of its own kind: that of its original, the
place of the script, and how many of that tensor were made there. A copy that one rank alone has
made nobody can ask for.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import attrs
import torch

from pfeife._torch import is_absent
from pfeife.runtime.distributed.foreign import Foreign
from pfeife.runtime.distributed.owned import Owned

_MOMENTS, _COPIES = 2**12, 2**8  # places between two calls, and copies of a tensor at each


class DeepCopies:
    """Those that were made since all ranks have last come together. `known` has the owners of all
    tensors, `numbered` these tensors by their numbers, `foreign` those that are absent here."""

    def __init__(
        self,
        known: MutableMapping[torch.Tensor, Owned],
        numbered: MutableMapping[int, torch.Tensor],
        foreign: Foreign,
    ):
        self.known, self.numbered, self.foreign = known, numbered, foreign
        self.new: dict[int, torch.Tensor] = {}

    def note(self, memo: Mapping[int, Any], moment: int) -> None:
        """Notes the copies that `copy.deepcopy` has made so far, by the ids of originals; `moment`
        is how much has changed since the last call."""
        for tensor, owned in list(self.known.items()):
            copied = memo.get(id(tensor))
            if not isinstance(copied, torch.Tensor) or copied in self.known:
                continue
            if is_absent(copied) == (tensor in self.foreign.found):
                self._note(copied, owned, moment)

    def _note(self, copied: torch.Tensor, owned: Owned, moment: int) -> None:
        number = -1 - (abs(owned.number) * _MOMENTS + moment % _MOMENTS) * _COPIES
        while number in self.new:
            number -= 1
        self.new[number] = copied
        self.give(copied, attrs.evolve(owned, number=number, replica=None))

    def give(self, copied: torch.Tensor, owned: Owned) -> None:
        """Gives a copy its owners."""
        self.known[copied], self.numbered[owned.number] = owned, copied
        if is_absent(copied):
            self.foreign.add(copied, owned)

    def agree(self, digests: Sequence[str], first: int) -> dict[int, Owned]:
        """Numbers the copies from `first` on, if all ranks have made the same ones by the digests
        of each; those of some ranks alone have no owners any more. Returns these by number."""
        new, self.new = self.new, {}
        numbered: dict[int, Owned] = {}
        alike = len(set(digests)) == 1
        for number, (before, copied) in enumerate(sorted(new.items()), first):
            owned = self.known.pop(copied)
            self.numbered.pop(before, None)
            self.foreign.found.pop(copied, None)
            if alike and owned.number == before:
                numbered[number] = attrs.evolve(owned, number=number)
                self.give(copied, numbered[number])
        return numbered
