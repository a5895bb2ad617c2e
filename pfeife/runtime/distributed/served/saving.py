"""`state_dict()` of a model on one rank: what other ranks train, they are asked for."""

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from pfeife import _torch
from pfeife.runtime.distributed.control.questions import copied
from pfeife.runtime.distributed.served.deep_copies import DeepCopies
from pfeife.runtime.distributed.served.state_client import Asking
from pfeife.runtime.distributed.state.remote_parameters import NOT_PICKLED, where_trained


class _Batch(threading.local):
    """The copies that a thread's outermost `state_dict()` gives, by number; `by` are that module
    and its prefix."""

    by: tuple[nn.Module, str] | None = None
    values: Mapping[int, torch.Tensor] = {}


class Saving:
    """Hooks of all modules with state that ranks train; every rank has the same ones, since they
    are captured with the model.

    The outermost module asks for all that it has, and each fills in its own. What this rank has is
    copied as well, so that all is of one moment and stays so:

                 before                    saved by torch           after
        model    asks rank 1 for the       (its children)           lets go of them
                 values of 1.weight
        model.0                            "0.weight": itself       "0.weight": a copy
        model.1  they are there            "1.weight": absent       "1.weight": values
    """

    def __init__(self, asking: Asking, copies: DeepCopies):
        self.asking, self.copies, self.batch = asking, copies, _Batch()
        self.watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def watch(self, roots: Iterable[nn.Module]) -> None:
        """Adds the hooks to those among the modules under some roots."""
        for module in {module: None for root in roots for module in root.modules()}:
            if module not in self.watched and any(map(self._trains, module.modules())):
                self.watched.add(module)
                module.register_state_dict_pre_hook(self.before)
                module.register_state_dict_post_hook(self._hook())
                module.register_load_state_dict_pre_hook(self.before_load)
                module.register_load_state_dict_post_hook(self.after_load)

    def _hook(self) -> Callable[..., None]:
        """`after` as something that torch can set an attribute of."""
        return functools.update_wrapper(functools.partial(self.after), self.after)

    def _trains(self, module: nn.Module) -> bool:
        """Whether ranks train any of a module's own state."""
        return any(True for _ in self._known([module]))

    def before(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Asks for what is missing below a module, and copies the rest. Raises ValueError where the
        parameters themselves are wanted, and what `Asking.tensors` does."""
        trained = list(self._known(module.modules()))
        # Pfeife looks for names, or every rank has all of it: torch's own state_dict() will do.
        if self.asking.foreign.reading or not self.asking.is_asked_for(trained):
            return
        missing = [tensor for tensor in trained if self.asking.is_missing(tensor)]
        if keep_vars:
            if not missing:
                return
            raise ValueError(
                f"{where_trained(self.asking.owners[missing[0]])}, so that state_dict() "
                "cannot give the tensor itself (keep_vars=True): call "
                "pfeife.full_state_dict(model) on every rank"
            )
        batch, numbers = self.batch, {self.asking.number(tensor) for tensor in trained}
        # The outermost module; the same one again is one whose last state_dict() has failed.
        if batch.by == (module, prefix) or not numbers <= batch.values.keys():
            batch.by, batch.values = (module, prefix), {}
            here = (tensor for tensor in trained if not self.asking.is_missing(tensor))
            # All is of one moment: this thread writes nothing between these copies and the answers,
            # which are of the point of the script at which it asks.
            copies = {self.asking.number(tensor): copied(tensor) for tensor in here}
            batch.values = copies | self.asking.tensors(missing)
            self.asking.watch_copies(batch.values)

    def after(
        self, module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, metadata: Any
    ) -> None:
        """Puts copies in the place of a module's own tensors. Raises ValueError if another hook has
        made something else of those that are absent."""
        batch = self.batch
        for name, tensor in _torch.saved_state(module).items():
            number = self.asking.number(tensor) if tensor in self.asking.owners else -1
            if number in batch.values:
                absent = self.asking.is_missing(tensor)
                _fill_in(state_dict, prefix + name, tensor, batch.values[number], absent)
        if batch.by == (module, prefix):
            batch.by, batch.values = None, {}

    def _known(self, modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
        """What ranks train of the state of modules."""
        state = (tensor for module in modules for tensor in _torch.saved_state(module).values())
        return (tensor for tensor in state if tensor in self.asking.owners)

    def absent_beside(self, tensors: Collection[torch.Tensor]) -> set[torch.Tensor]:
        """What this rank lacks of the state of modules that have some tensors."""
        absent = set[torch.Tensor]()
        for module in list(self.watched):
            state = set(self._known(module.modules()))
            if not state.isdisjoint(tensors):
                absent |= {tensor for tensor in state if self.asking.is_missing(tensor)}
        return absent

    def before_load(self, module: nn.Module, state: Mapping[str, Any], *args: Any) -> None:
        """Loading waits for those who read, and is counted. Raises what `Service.begin` does."""
        # What is loaded may be what state_dict() has given, changed: that is what loading is for.
        if self._trains(module):
            self.asking.service.copies.release(dict(state))
            self.asking.service.begin("loads of state")

    def after_load(self, module: nn.Module, *args: Any) -> None:
        """What was loaded counts as a change that all ranks make."""
        if self._trains(module):
            self.asking.service.end_of("loads of state", self._known([module]))

    def __deepcopy__(self, memo: dict) -> "Saving":
        """Called while a module with these hooks is copied, after its own tensors."""
        self.copies.note(memo)
        return self

    def __reduce__(self) -> Any:
        raise ValueError(NOT_PICKLED)


def _fill_in(
    state_dict: MutableMapping[str, Any],
    key: str,
    tensor: torch.Tensor,
    copy: torch.Tensor,
    absent: bool,
) -> None:
    """Puts a copy where a tensor is; that is nowhere if a hook has dropped it. Raises ValueError if
    a hook has changed it and it is `absent`."""
    if absent and key in state_dict and not _is_in(state_dict[key], tensor):
        raise ValueError(_otherwise(key))
    # A hook may have put it under another key, or more of them.
    keys = (
        [key]
        if key in state_dict
        else [k for k, value in state_dict.items() if _is_in(value, tensor)]
    )
    for at in keys:
        if absent and state_dict[at].shape != copy.shape:
            raise ValueError(_otherwise(at))
        if absent or _is_in(state_dict[at], tensor):
            state_dict[at] = copy


def _is_in(value: Any, tensor: torch.Tensor) -> bool:
    """Whether a value is in the memory of a tensor."""
    if not isinstance(value, torch.Tensor):
        return False
    return _torch.storage_of(value) == _torch.storage_of(tensor)


def _otherwise(key: str) -> str:
    return (
        f"a hook of state_dict() has changed {key}, which other ranks train, before its values "
        "were there: call pfeife.full_state_dict(model) on every rank, and change what it returns"
    )
