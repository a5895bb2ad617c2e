"""State that other ranks train: here it has no values, and whoever reads it is told what to do."""

import hashlib
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch.utils.weak import WeakIdKeyDictionary

from pfeife import _torch
from pfeife._torch import is_absent
from pfeife.frontend.deferred.remote_batch import Absence, become_absent
from pfeife.runtime.distributed.state.owned import Owned

NOT_PICKLED = (
    "a model whose parameters are trained by several ranks cannot be pickled: save "
    "model.state_dict()"
)


Spreads = Callable[[Owned, Sequence[torch.Tensor]], None]


@attrs.define(eq=False)
class RemoteState(Absence):
    """Why a tensor that other ranks own, or what was computed of it, has no values.

    `tensor` is the one that they own, None for what was computed; `spreads` is called with the
    tensors that this is about to be written to. `writes` counts what the script has done to it in
    place since it has no values, through `tensor.data` too; `version` is what torch had counted
    until then.
    """

    owned: Owned
    tensor: weakref.ref[torch.Tensor] | None
    spreads: Spreads
    writes: int = 0
    version: int = 0

    def refusal(self, what: str) -> ValueError:
        tensor = None if self.tensor is None else self.tensor()
        done = "kept" if tensor is not None and not tensor.requires_grad else "trained"
        return ValueError(
            f"{where_trained(self.owned, done)}, and {what} reads it: read it in a step of "
            "pfeife.compile, also to evaluate, or in pfeife.full_state_dict(model), which every "
            "rank must call"
        )

    def derived(self) -> "RemoteState":
        return RemoteState(self.owned, None, self.spreads)

    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        self.spreads(self.owned, tensors)

    def written(self, tensor: torch.Tensor) -> None:
        self.writes += 1


class Foreign:
    """The tensors that this rank does not train, by themselves: those that have no values here, and
    `copies` of what another replica trains. `spreads` is called before what was computed of one is
    written into tensors of this rank."""

    def __init__(self, spreads: Spreads = lambda owned, tensors: None) -> None:
        self.spreads = spreads
        self.found, self.copies = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self.reading = False  # whether pfeife itself looks for the names of all state

    def __contains__(self, tensor: object) -> bool:
        return tensor in self.found or tensor in self.copies

    def add(self, tensor: torch.Tensor, owned: Owned) -> None:
        """Lets go of a tensor's values."""
        self.found[tensor] = RemoteState(owned, weakref.ref(tensor), self.spreads)
        self._let_go(tensor)

    def _let_go(self, tensor: torch.Tensor) -> None:
        state = self.found[tensor]
        become_absent(tensor, state)
        state.writes, state.version = 0, version_of(tensor)

    def guard(self, tensor: torch.Tensor) -> None:
        """Refuses the gradient of an absent parameter, of whatever has read it before it was."""
        if tensor in self.found:
            tensor.register_hook(Arrival(where_trained(self.found[tensor].owned)))

    def forget(self, numbers: Iterable[int]) -> None:
        """Lets go of the values of some tensors again."""
        wanted = set(numbers)
        for tensor, state in self.found.items() if wanted else ():
            if state.owned.number in wanted:
                self._let_go(tensor)

    def changed(self, values: Iterable[Any]) -> list[int]:
        """The numbers of those among some values that were given values by somebody."""
        loaded = (self.found[value].owned.number for value in values if self._is_loaded(value))
        return sorted(set(loaded))

    def _is_loaded(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value in self.found and not is_absent(value)

    def lacks(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is absent here, and no values have been loaded since."""
        return tensor in self.found and is_absent(tensor)

    def data_writes(self, tensor: torch.Tensor) -> int:
        """How often the script has changed an absent tensor so that its version does not tell."""
        state = self.found.get(tensor)
        if state is None:
            return 0
        # `writes` counts all, the version those that do not go through `data`; a tensor whose
        # `data` was assigned has another record.
        counted = version_of(tensor) - state.version
        replaced = is_absent(tensor) and _torch.record_of(tensor) is not state
        return max(0, state.writes - counted) + replaced


def version_of(tensor: Any) -> int:
    """How often a tensor was changed in place, where torch counts it."""
    return -1 if tensor.is_inference() else int(tensor._version)


@attrs.frozen
class Arrival:
    """A hook of a parameter that is trained elsewhere, as it `says`: autograd calls it with None
    after a step of ours."""

    says: str

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            raise ValueError(
                f"{self.says}, and something outside of the compiled step has used it, such as a "
                "penalty added to the loss: its gradient arrived here. Compute that inside of the "
                "step"
            )


def where_trained(owned: Owned, done: str = "trained") -> str:
    """In words."""
    ranks = ", ".join(map(str, owned.ranks))
    return f"state of other ranks: {owned.name} is {done} by rank {ranks} and has no values here"


@attrs.define(eq=False)
class UntrainedState:
    """The state of one program that nobody trains, of which every rank has a copy: by its names,
    its places among a call's arguments, and whether this rank reads it. A copy of trained
    parameters that is kept up to date outside of the step, such as a moving average, becomes absent
    where these are."""

    names: tuple[str, ...] = ()
    at: tuple[int, ...] = ()
    read: tuple[bool, ...] = ()
    versions: Sequence[int] = ()
    absent: tuple[bool, ...] = ()  # which have been so from the beginning

    def among(self, args: Sequence[Any]) -> list[tuple[str, Any]]:
        """It with its names."""
        return [(name, args[place]) for name, place in zip(self.names, self.at, strict=True)]

    def news(self, args: Sequence[Any], trained: Container[torch.Tensor]) -> tuple[list[str], str]:
        """The names of what this rank reads and has no more, and a digest of how often all has been
        written to since the ranks have last agreed, "" if that is all as it was. What is `trained`
        by now is left out."""
        self.forget(args, trained)
        state = zip(self.names, self.at, self.read, self.absent, strict=True)
        lost = [n for n, at, read, before in state if read and not before and is_absent(args[at])]
        writes = [new - old for new, old in zip(self._versions(args), self.versions, strict=True)]
        return lost, digest(writes) if lost or any(writes) else ""

    def forget(self, args: Sequence[Any], trained: Container[torch.Tensor]) -> None:
        """Leaves out what is `trained` by now: another program has been the first to do so."""
        left = [i for i, place in enumerate(self.at) if args[place] not in trained]
        self.names = tuple(self.names[i] for i in left)
        self.at = tuple(self.at[i] for i in left)
        self.read = tuple(self.read[i] for i in left)
        self.absent = tuple(self.absent[i] for i in left)
        self.versions = [self.versions[i] for i in left]

    def agreed(self, args: Sequence[Any]) -> None:
        """All ranks know what has been written, and nothing is wrong with it."""
        self.versions = self._versions(args)

    def _versions(self, args: Sequence[Any]) -> list[int]:
        return [version_of(args[place]) for place in self.at]


def digest(values: Iterable[object]) -> str:
    """A short text for some numbers or texts, "" for none."""
    text = "\n".join(map(str, values))
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""
