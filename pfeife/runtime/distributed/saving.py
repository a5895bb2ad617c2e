"""`state_dict()` of a model on one rank: what other ranks train, they are asked for."""

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from pfeife import _torch
from pfeife.runtime.distributed.asking import Asking
from pfeife.runtime.distributed.foreign import NOT_PICKLED, where_trained


class _Batch(threading.local):
    """The values that a thread's outermost `state_dict()` has asked for, by number; `by` are that
    module and its prefix."""

    by: tuple[nn.Module, str] | None = None
    values: Mapping[int, torch.Tensor] = {}


class Saving:
    """Hooks of all modules with state that ranks train; every rank has the same ones, since they
    are captured with the model.

    The outermost module asks for all that it has, and each fills in its own:

                 before                    saved by torch           after
        model    asks rank 1 for the       (its children)           lets go of them
                 values of 1.weight
        model.1  they are there            "1.weight": absent       "1.weight": values
    """

    def __init__(self, asking: Asking):
        self.asking, self.batch = asking, _Batch()
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
        return any(one in self.asking.known for one in _torch.saved_state(module).values())

    def before(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Asks for what is missing below a module. Raises ValueError where the parameters
        themselves are wanted, and what `Asking.tensors` does."""
        missing = self._missing(module.modules())
        if not missing:
            return
        if keep_vars:
            raise ValueError(
                f"{where_trained(self.asking.known[missing[0]])}, so that state_dict() "
                "cannot give the tensor itself (keep_vars=True): call "
                "pfeife.full_state_dict(model) on every rank"
            )
        batch, numbers = self.batch, {self.asking.number(one) for one in missing}
        if batch.by == (module, prefix) or not numbers <= batch.values.keys():
            batch.by, batch.values = (module, prefix), {}
            own = (one for m in module.modules() for one in _torch.saved_state(m).values())
            known = [one for one in own if one in self.asking.known]
            batch.values = self.asking.tensors(missing, known)

    def after(
        self, module: nn.Module, found: MutableMapping[str, Any], prefix: str, metadata: Any
    ) -> None:
        """Puts the values of a module's own tensors where they are absent. Raises ValueError if
        another hook has made something else of them."""
        own = _torch.saved_state(module)
        batch = self.batch
        for name, tensor in own.items():
            if self._missing_here(tensor):
                number = self.asking.number(tensor)
                _fill_in(found, prefix + name, tensor, batch.values[number])
                self.asking.handed.note_value(number, tensor, batch.values[number])
        if batch.by == (module, prefix):
            batch.by, batch.values = None, {}

    def _missing_here(self, tensor: torch.Tensor) -> bool:
        return self.asking.is_missing(tensor) and self.asking.number(tensor) in self.batch.values

    def _missing(self, modules: Iterable[nn.Module]) -> list[torch.Tensor]:
        if self.asking.foreign.reading or not self.asking.foreign.found:
            return []
        own = (one for module in modules for one in _torch.saved_state(module).values())
        return [one for one in own if self.asking.is_missing(one)]

    def before_load(self, module: nn.Module, *args: Any) -> None:
        """Loading waits for those who read, and is counted. Raises what `Service.begin` does."""
        if self._trains(module):
            self.asking.service.begin("loads of state")

    def after_load(self, module: nn.Module, *args: Any) -> None:
        if self._trains(module):
            own = _torch.saved_state(module).values()
            mine = [one for one in own if one in self.asking.known]
            self.asking.service.end_of("loads of state", mine)
            self.asking.handed.follow()

    def __deepcopy__(self, memo: dict) -> "Saving":
        return self  # copies have tensors of their own, which are not absent

    def __reduce__(self) -> Any:
        raise ValueError(NOT_PICKLED)


def _fill_in(
    found: MutableMapping[str, Any], key: str, absent: torch.Tensor, value: torch.Tensor
) -> None:
    """Puts a value where the absent tensor is; that is nowhere if a hook has dropped it."""
    if key in found and not _is_in(found[key], absent):
        raise ValueError(_otherwise(key))
    keys = [key] if key in found else [k for k, one in found.items() if _is_in(one, absent)]
    for one in keys:
        if found[one].shape != value.shape:
            raise ValueError(_otherwise(one))
        found[one] = value.detach()


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
