"""Copies of modules with state that ranks train: each is where what it was copied of is.

              rank 0     rank 1
    model.0   trained    absent     Owned(0, ranks=(0,))
    best.0    values     absent     Owned(-3, ranks=(0,)), at the next call Owned(2, ranks=(0,))

They are deep copies, and moving averages that are older than the first step: these are whole on
each rank until the script writes to them what a rank does not have.

Until all ranks have come together a copy has a number of its own kind: that of its original, the
place of the script, and how many of that tensor were made there. A copy that one rank alone has
made nobody can ask for. Nobody can ask for an average before that: of two averages of one model a
rank may have written to another one first.
"""

import functools
import weakref
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from pfeife import _torch
from pfeife._torch import is_absent
from pfeife.frontend.deferred.remote_batch import become_absent
from pfeife.frontend.watch.gc_objects import living
from pfeife.runtime.distributed.control.script_point import Place
from pfeife.runtime.distributed.served.state_client import Asking
from pfeife.runtime.distributed.state.owned import Owned

_MOMENTS, _COPIES = 2**12, 2**8  # places between two calls, and copies of a tensor at each


class DeepCopies:
    """Those that were made since all ranks have last come together. `owners` has those of all
    tensors, `asking` these tensors by their numbers."""

    def __init__(self, owners: MutableMapping[torch.Tensor, Owned], asking: Asking):
        self.owners, self.asking, self.foreign = owners, asking, asking.foreign
        self.new: dict[int, torch.Tensor] = {}
        self.found: list[nn.Module] = []  # averages among them
        # The modules that there are, looked for once at each place of the script.
        self.modules_at = functools.lru_cache(1)(_modules)

    def note(self, memo: Mapping[int, Any]) -> None:
        """Notes the copies that `copy.deepcopy` has made so far, by the ids of originals."""
        for tensor, owned in list(self.owners.items()):
            copied = memo.get(id(tensor))
            if not isinstance(copied, torch.Tensor) or copied in self.owners:
                continue
            # A copy that has values where its original is absent was given them by the script.
            if is_absent(copied) == (tensor in self.foreign.found):
                self._note(copied, owned)
                self.asking.writes.forget([copied])

    def find(self, owned: Owned, copied: nn.Parameter, watched: Collection[nn.Module]) -> None:
        """Notes the module to which a parameter belongs that has values of an `owned` one by now,
        if it has the layout of a module that is `watched`, or of another average."""
        original = self.asking.numbered.get(owned.number)
        modules = self.modules_at(self.asking.service.script.now.place)
        unwatched = [module for module in modules if module not in watched]
        if original is None or not any(_has(module, copied) for module in unwatched):
            return
        for module, state in _with(original, [*watched, *self.found]):
            for candidate in unwatched:
                copies = _state(candidate) if type(candidate) is type(module) else {}
                if _shapes(copies) == _shapes(state) and _same(state, original, copies, copied):
                    self._note_all(state, copies)
                    self.found.append(candidate)
                    return

    def _note_all(
        self, originals: Mapping[str, torch.Tensor], copies: Mapping[str, torch.Tensor]
    ) -> None:
        """Notes a module's state; what of it this rank does not have of the originals is absent
        from now on, whether the script has written to it yet or not."""
        for name, tensor in originals.items():
            copied = copies[name]
            if tensor in self.owners and copied not in self.owners:
                if tensor in self.foreign.found and not is_absent(copied):
                    become_absent(copied, self.foreign.found[tensor].derived())
                self._note(copied, self.owners[tensor])

    def _note(self, copied: torch.Tensor, owned: Owned) -> None:
        """Gives a copy a number until the ranks come together."""
        moment = sum(self.asking.service.script.now.place.counts[1:])  # changes since the last call
        # Negative, unlike the numbers that ranks have agreed on; the same where they copy alike.
        number = -1 - (abs(owned.number) * _MOMENTS + moment % _MOMENTS) * _COPIES
        # Several copies of one tensor at one place are told apart by their order.
        while number in self.new:
            number -= 1
        self.new[number] = copied
        self.give(copied, attrs.evolve(owned, number=number, replica=None))

    def give(self, copied: torch.Tensor, owned: Owned) -> None:
        """Gives a copy its owners."""
        self.owners[copied], self.asking.numbered[owned.number] = owned, copied
        if is_absent(copied):
            self.foreign.add(copied, owned)

    def agree(self, digests: Sequence[str], first: int) -> dict[int, Owned]:
        """Numbers the copies from `first` on, if all ranks have made the same ones by the digests
        of each; those of some ranks alone have no owners any more. Returns these by number."""
        numbered: dict[int, Owned] = {}
        alike = len(set(digests)) == 1
        # In the order of their provisional numbers, which is the same on all ranks.
        for number, (before, copied) in enumerate(sorted(self.new.items()), first):
            owned = self.owners.pop(copied)
            self.asking.numbered.pop(before, None)
            self.foreign.found.pop(copied, None)
            if alike and owned.number == before:
                numbered[number] = attrs.evolve(owned, number=number)
                self.give(copied, numbered[number])
        self.new.clear()
        return numbered


def _modules(place: Place) -> "weakref.WeakSet[nn.Module]":
    return weakref.WeakSet(living(nn.Module))


def _with(
    tensor: torch.Tensor, modules: Iterable[nn.Module]
) -> list[tuple[nn.Module, Mapping[str, torch.Tensor]]]:
    """Those of some modules that have a tensor, with their state, the largest first."""
    states = [(module, _state(module)) for module in modules]
    having = [pair for pair in states if any(value is tensor for value in pair[1].values())]
    return sorted(having, key=lambda pair: -len(pair[1]))


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's state with that of the modules below it, by name."""
    return {
        f"{prefix}.{name}": tensor
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name, tensor in _torch.saved_state(part).items()
    }


def _has(module: nn.Module, parameter: nn.Parameter) -> bool:
    return any(candidate is parameter for candidate in module.parameters(recurse=False))


def _shapes(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}


def _same(
    originals: Mapping[str, torch.Tensor],
    original: torch.Tensor,
    copies: Mapping[str, torch.Tensor],
    copied: torch.Tensor,
) -> bool:
    """Whether a tensor is among copies where its original is."""
    return any(copies[name] is copied for name, tensor in originals.items() if tensor is original)
