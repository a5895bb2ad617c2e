"""State that other ranks train: here it is NaN, and whoever reads it is told what to do.

Integers are the least of their dtype.
"""

import hashlib
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from pfeife._torch import is_exporting, is_shared
from pfeife.runtime.distributed.nan_memory import nan_like

NOT_PICKLED = (
    "a model whose parameters are trained by several ranks cannot be pickled: save "
    "model.state_dict()"
)
_PROBED = 16  # tensors that every call looks into


@attrs.define(eq=False)
class _Absent:
    """One such tensor; `version` and `place` are those of when it became NaN, `probe` is a look at
    its first value where that can be NaN."""

    tensor: weakref.ref[torch.Tensor]
    number: int
    name: str
    ranks: tuple[int, ...]
    version: int = 0
    place: int = 0
    probe: torch.Tensor | None = None

    def moved(self) -> "_Absent":
        """With a look at where the values are now: model.to(...) moves them."""
        tensor = self.tensor()
        if tensor is not None and self.probe is not None and tensor.data_ptr() != self.place:
            self.place, self.probe = tensor.data_ptr(), _probe(tensor)
            if _are_nothing([self.probe]):
                _fill(tensor, self)
        return self


class Foreign:
    """The tensors that this rank does not train, by themselves: those that are absent, and `copies`
    of what another replica trains."""

    def __init__(self) -> None:
        self.found, self.copies = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self.listed: list[_Absent] = []
        self.turn = 0
        self.reading = False  # whether pfeife itself looks for the names of all state

    def __contains__(self, tensor: object) -> bool:
        return tensor in self.found or tensor in self.copies

    def add(self, tensor: torch.Tensor, number: int, name: str, ranks: tuple[int, ...]) -> None:
        """Lets go of a tensor's values."""
        one = self.found[tensor] = _Absent(weakref.ref(tensor), number, name, ranks)
        self.listed = [*(other for other in self.listed if other.tensor() is not None), one]
        _fill(tensor, one)

    def guard(self, tensor: torch.Tensor) -> None:
        """Refuses the gradient of an absent parameter, of whatever has read it."""
        if tensor in self.found:
            tensor.register_hook(_Arrival(self.found[tensor]))

    def forget(self, numbers: Iterable[int]) -> None:
        """Lets go of the values of some tensors again."""
        wanted = set(numbers)
        for tensor, one in self.found.items() if wanted else ():
            if one.number in wanted:
                _fill(tensor, one)

    def changed(self, values: Iterable[Any]) -> list[int]:
        """The numbers of those among some values that somebody has written to. That leaves a trace
        in a tensor's version unless it was done through `.data`: for that a few are looked into,
        in turn."""
        asked = set(map(id, values))
        mine = [one for one in self.listed if id(one.tensor()) in asked]
        for one in mine:
            self._settle(one)
        written = [one.number for one in mine if version_of(one.tensor()) != one.version]
        self.turn = (self.turn + _PROBED) % max(1, len(mine))
        few = mine[self.turn : self.turn + _PROBED]
        if not _are_nothing([one.moved().probe for one in few]):
            written += [one.number for one in mine if not _are_nothing([one.moved().probe])]
        return sorted(set(written))

    def _settle(self, one: _Absent) -> None:
        """What was written to a tensor and is still NaN, as by an optimizer, is no news."""
        tensor, probe = one.tensor(), one.moved().probe
        if tensor is None or version_of(tensor) == one.version:
            return
        if probe is not None and _are_nothing([probe]):
            _fill(tensor, one)

    def lacks(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is absent here, and no values have been loaded since."""
        one = self.found.get(tensor)
        if one is not None:
            self._settle(one)
        return one is not None and version_of(tensor) == one.version

    def data_writes(self, tensor: torch.Tensor) -> int:
        """How often an absent tensor was written to by its `data`, or a view of that, since it
        became absent."""
        return 0

    def first(self) -> _Absent | None:
        """One that is absent, if any."""
        return next((one for one in self.listed if one.tensor() is not None), None)

    def stale(self, module: nn.Module) -> _Absent | None:
        """The first of a module's own tensors that is absent here; None if there is none, or
        values have been loaded since."""
        if self.reading or not self.found:
            return None
        own = _own(module)
        absent = ((tensor, self.found[tensor]) for tensor in own if tensor in self.found)
        return next((one for tensor, one in absent if version_of(tensor) == one.version), None)


def version_of(tensor: Any) -> int:
    """How often a tensor was changed in place, where torch counts it."""
    return -1 if tensor.is_inference() else int(tensor._version)


def _own(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _fill(tensor: torch.Tensor, one: _Absent) -> None:
    """NaN instead of values, without memory where that can be, in a way that neither autograd nor
    Dynamo takes for a change."""
    if tensor.is_floating_point() or tensor.is_complex():
        nothing = nan_like(tensor)
        if nothing is None or is_shared(tensor):  # by p.data that a script has kept, say
            blank(tensor.data)
        if nothing is not None:
            tensor.data = nothing
    else:  # a count of batches
        blank(tensor.data)
    one.probe = _probe(tensor)
    one.version, one.place = version_of(tensor), tensor.data_ptr()


def blank(tensor: torch.Tensor) -> None:
    """NaN, or the least integer, instead of values, in their own memory."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype.is_signed:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def lacks_values(tensor: torch.Tensor) -> bool:
    """Whether some values of a tensor, or all that it has, are those of what other ranks train, or
    made of them."""
    if tensor.is_floating_point() and _is_dense(tensor):
        return bool(tensor.detach().isnan().any())
    probe = _probe(tensor.detach())
    return probe is not None and _is_nothing(probe) and _is_nothing(tensor.detach())


def _probe(tensor: torch.Tensor) -> torch.Tensor | None:
    known = _is_dense(tensor) and tensor.numel() and tensor.dtype.is_signed
    return tensor.data.as_strided((1,), (1,)) if known else None


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested)


def begins_with_nan(tensors: Iterable[Any]) -> bool:
    """Whether the first value of any of some tensors is NaN."""
    kinds: dict[tuple, list[torch.Tensor]] = {}
    for one in tensors:
        probe = _probe(one.detach()) if one.is_floating_point() else None
        if probe is not None:
            kinds.setdefault((probe.dtype, probe.device), []).append(probe)
    return any(bool(torch.cat(same).isnan().any()) for same in kinds.values())


def _are_nothing(probes: Sequence[torch.Tensor | None]) -> bool:
    kinds: dict[tuple, list[torch.Tensor]] = {}
    for probe in probes:
        if probe is not None:
            kinds.setdefault((probe.dtype, probe.device), []).append(probe)
    return all(_is_nothing(torch.cat(same)) for same in kinds.values())


def _is_nothing(values: torch.Tensor) -> bool:
    if values.is_floating_point() or values.is_complex():
        return bool(values.isnan().all())
    return bool((values == torch.iinfo(values.dtype).min).all())


@attrs.frozen
class _Arrival:
    """A hook of an absent parameter: autograd calls it with None after a step of ours."""

    one: _Absent

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            raise ValueError(
                f"{where_trained(self.one)}, and something outside of the compiled step has used "
                "it, such as a penalty added to the loss: its gradient arrived here. Compute that "
                "inside of the step"
            )


class Guard:
    """Hooks of the modules with state that ranks own (`owned`). They are captured with the model,
    so that every rank has the same ones, and where nothing is absent they do nothing. `ask` gives
    the values of absent tensors."""

    def __init__(
        self,
        owned: Container[torch.Tensor],
        foreign: Foreign,
        ask: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    ):
        self.owned, self.foreign, self.ask = owned, foreign, ask
        self.watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def watch(self, roots: Iterable[nn.Module]) -> None:
        """Guards those among the modules under some roots."""
        for module in {module: None for root in roots for module in root.modules()}:
            if module not in self.watched and any(one in self.owned for one in _own(module)):
                self.watched.add(module)
                module.register_forward_pre_hook(self.running)

    def running(self, module: nn.Module, args: Any) -> None:
        absent = self.foreign.first() if is_exporting() else None
        if absent is not None:
            raise ValueError(
                f"{where_trained(absent)}, so the model cannot be exported here: "
                "export a model of one device that has been given pfeife.full_state_dict(model), "
                "which every rank calls"
            )
        if torch.compiler.is_compiling():
            return
        one = self.foreign.stale(module)
        if one is not None:
            raise ValueError(
                f"{where_trained(one)}, so the model cannot be run by hand: run it in a step of "
                "pfeife.compile, also to evaluate, or load pfeife.full_state_dict(model), which "
                "every rank must call, into it first"
            )

    def __deepcopy__(self, memo: dict) -> "Guard":
        """Called when a module is copied, after its tensors: the copies, which are not absent, get
        the values that the owners have. Raises what asking them does."""
        copied = [one for one in self.foreign.found if id(one) in memo and self.foreign.lacks(one)]
        copied = [one for one in copied if _are_nothing([_probe(memo[id(one)])])]
        with torch.no_grad():
            for one, value in zip(copied, self.ask(copied) if copied else (), strict=True):
                memo[id(one)].copy_(value)
        return self

    def __reduce__(self) -> Any:
        raise ValueError(NOT_PICKLED)


def where_trained(one: _Absent) -> str:
    """In words."""
    ranks, tensor = ", ".join(map(str, one.ranks)), one.tensor()
    what = "kept" if tensor is not None and not tensor.requires_grad else "trained"
    return f"state of other ranks: {one.name} is {what} by rank {ranks} and is NaN here"


@attrs.define(eq=False)
class Borrowed:
    """The state of one program that nobody trains, of which every rank has a copy: by its names,
    its places among a call's arguments, and whether this rank reads it. A copy of trained
    parameters that is kept up to date outside of the step, such as a moving average, becomes NaN
    where these are absent."""

    names: tuple[str, ...]
    at: tuple[int, ...]
    read: tuple[bool, ...]
    versions: list[int]
    nan: tuple[bool, ...]  # which have begun with NaN

    def news(
        self, args: Sequence[Any], trained: Container[torch.Tensor], absent: bool
    ) -> list[str]:
        """What has been written to since the ranks have last agreed, and, if anything is `absent`
        here, what of it has become NaN: a line each. What is `trained` by now is left out."""
        if self._versions(args) == self.versions and not (absent and self._unseen(args)):
            return []
        self.forget(args, trained)
        versions, unseen = self._versions(args), absent and self._unseen(args)
        if versions == self.versions and not unseen:
            return []
        writes = [new - old for new, old in zip(versions, self.versions, strict=True)]
        mine = zip(self.names, self.at, self.read, writes, strict=True)
        changed = [(n, args[at]) for n, at, r, count in mine if absent and r and (count or unseen)]
        found = [f"nan {name}" for name, value in changed if value.isnan().any()]
        return [*found, f"borrowed {digest(writes)}"]

    def _unseen(self, args: Sequence[Any]) -> bool:
        """Whether something has become NaN, through `.data` it may be, which versions do not tell:
        the first values say so."""
        mine = zip(self.at, self.read, self.nan, strict=True)
        return begins_with_nan(args[at] for at, read, nan in mine if read and not nan)

    def forget(self, args: Sequence[Any], trained: Container[torch.Tensor]) -> None:
        """Leaves out what is `trained` by now: another program has been the first to do so."""
        left = [i for i, place in enumerate(self.at) if args[place] not in trained]
        self.names = tuple(self.names[i] for i in left)
        self.at = tuple(self.at[i] for i in left)
        self.read = tuple(self.read[i] for i in left)
        self.nan = tuple(self.nan[i] for i in left)
        self.versions = [self.versions[i] for i in left]

    def agreed(self, args: Sequence[Any]) -> None:
        """All ranks know what has been written, and nothing is wrong with it."""
        self.versions = self._versions(args)

    def _versions(self, args: Sequence[Any]) -> list[int]:
        return [version_of(args[place]) for place in self.at]


def digest(writes: Sequence[int]) -> str:
    """A short text for how often each of some tensors has been written to."""
    return hashlib.sha256(",".join(map(str, writes)).encode()).hexdigest()[:16]
