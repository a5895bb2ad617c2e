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
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
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
        """Says who has the values, and where they may be read."""
        tensor = None if self.tensor is None else self.tensor()
        done = "kept" if tensor is not None and not tensor.requires_grad else "trained"
        return ValueError(
            f"{where_trained(self.owned, done)}, and {what} reads it: read it in a step of "
            "pfeife.compile, also to evaluate, or in pfeife.full_state_dict(model), which every "
            "rank must call"
        )

    def derived(self) -> "RemoteState":
        """That of what is computed of it, which nobody owns."""
        return RemoteState(self.owned, None, self.spreads)

    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        """What was computed of it is about to be written to some tensors of this rank."""
        self.spreads(self.owned, tensors)

    def written(self, tensor: torch.Tensor) -> None:
        """The script has changed it, which counts, whatever torch sees of that."""
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
        # Noted before: an interrupt that comes in between must leave a record to count by.
        become_absent(tensor, state)
        state.writes, state.version = 0, version_of(tensor)

    def guard(self, tensor: torch.Tensor) -> None:
        """Refuses the gradient of an absent parameter, of whatever has read it before it was."""
        if tensor in self.found:
            tensor.register_hook(Arrival(where_trained(self.found[tensor].owned)))

    def forget(self, numbers: Iterable[int]) -> None:
        """Lets go of the values of some tensors again."""
        # A loop over all is slow where a model has many tensors, and mostly nothing is wanted.
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


class Versions:
    """How often tensors were written to since each was last marked, by a `count` of all writes."""

    def __init__(self, count: Callable[[Any], int] = version_of):
        self.count, self.marked = count, WeakIdKeyDictionary()

    def __contains__(self, tensor: object) -> bool:
        return tensor in self.marked

    def mark(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts from zero."""
        for tensor in tensors:
            self.marked[tensor] = self.count(tensor)

    def since(self, tensor: torch.Tensor) -> int:
        """The writes since then, 0 for one that was not marked."""
        before = self.marked.get(tensor)
        return 0 if before is None else self.count(tensor) - before

    def written(self) -> list[tuple[torch.Tensor, int]]:
        """Those of the marked tensors that live and were written to, with how often."""
        # Called several times a step for all that ranks train: a look-up of each takes longer.
        pairs = [(tensor, self.count(tensor) - before) for tensor, before in self.marked.items()]
        return [(tensor, count) for tensor, count in pairs if count]


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
    ranks = ", ".join(map(str, owned.everywhere))
    return f"state of other ranks: {owned.name} is {done} by rank {ranks} and has no values here"


@attrs.frozen
class Untrained:
    """A place among a call's arguments, with its tensor's name; whether this rank reads it, and
    whether it was absent from the beginning."""

    name: str
    at: int
    is_read: bool
    was_absent: bool


@attrs.frozen(eq=False)
class UntrainedState:
    """The state of one program that nobody trains, of which every rank has a copy, and how often
    each was written to since the ranks have last agreed. A copy of trained parameters that is kept
    up to date outside of the step, such as a moving average, becomes absent where these are.

    What is `trained` by now is left out: another program has been the first to do so."""

    places: tuple[Untrained, ...] = ()
    versions: Versions = attrs.Factory(Versions)

    @classmethod
    def of(
        cls,
        program: Program,
        names: Sequence[str | None],
        args: Sequence[Any],
        rank: int,
        trained: Container[torch.Tensor],
    ) -> "UntrainedState":
        """That of a program on a rank of its pipeline; `names` are the arguments' ports."""
        calls = {call.node for call in program.calls if call.rank == rank}
        nodes = {n.name: n for n in program.module.graph.nodes if n.op == "placeholder"}
        ports = {p.name: p.fqn for p in program.ports(Role.PARAMETER, Role.BUFFER)}
        places = [
            Untrained(
                ports[name], at, any(u.name in calls for u in nodes[name].users), is_absent(value)
            )
            for at, (name, value) in enumerate(zip(names, args, strict=True))
            if name in ports and value not in trained
        ]
        state = cls(tuple(places))
        state.versions.mark(args[place.at] for place in places)
        return state

    def among(
        self, args: Sequence[Any], trained: Container[torch.Tensor]
    ) -> list[tuple[Untrained, Any]]:
        """What of it is left among a call's arguments."""
        pairs = ((place, args[place.at]) for place in self.places)
        return [(place, tensor) for place, tensor in pairs if tensor not in trained]

    def news(self, args: Sequence[Any], trained: Container[torch.Tensor]) -> tuple[list[str], str]:
        """The names of what this rank reads and has no more, and a digest of how often all has been
        written to since the ranks have last agreed, "" if that is all as it was."""
        left = self.among(args, trained)
        lost = [p.name for p, value in left if p.is_read and not p.was_absent and is_absent(value)]
        # Another tensor in a place counts as one that was written to.
        writes = [self.versions.since(v) if v in self.versions else -1 for _, v in left]
        return lost, digest(writes) if lost or any(writes) else ""


def digest(values: Iterable[object]) -> str:
    """A short text for some numbers or texts, "" for none."""
    text = "\n".join(map(str, values))
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""
