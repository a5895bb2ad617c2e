"""What is read of a checkpoint: the model and its optimizers, by the names of parameters."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pfeife.frontend.arguments import aliases
from pfeife.frontend.deferred.checkpoint import shelve
from pfeife.frontend.deferred.checkpoint_files import check_shapes
from pfeife.frontend.deferred.checkpoint_folder import Folder
from pfeife.frontend.deferred.tensors import deferred_tensors, is_waiting
from pfeife.runtime.distributed.process_group import world_so_far
from pfeife.runtime.distributed.world.shares import name_in, owner_of, reading
from pfeife.runtime.distributed.world.world import World

MODEL, OPTIMIZER = "model", "optim"
_OPTIONS, _STATE = f"{OPTIMIZER}.param_groups.", f"{OPTIMIZER}.state."
_EXTRA = "_extra_state"  # what torch calls it


def plain_name(name: str) -> str:
    """A name as it is without torch.compile around the model."""
    return name.replace("_orig_mod.", "")


def names_of(model: nn.Module) -> dict[torch.Tensor, str]:
    """The first name of every parameter."""
    return {parameter: plain_name(name) for name, parameter in model.named_parameters()}


def load_model(model: nn.Module, folder: Folder, world: World | None) -> None:
    """Reads a model's state in place: on this rank what no other one trains alone. What was made
    without values is read when it is needed. Raises ValueError for a name that only one of the two
    has, and for another shape."""
    waiting = deferred_tensors(model)
    state = (
        _state_without_values(model)
        if waiting
        else reading(world, lambda: model.state_dict(keep_vars=True))
    )
    keys = {f"{MODEL}.{plain_name(name)}": value for name, value in state.items()}
    _check(keys, folder)
    own = aliases(model)
    if not all(id(value) in own or _is_extra(key) for key, value in keys.items()):
        # A hook has made something else of the state: there is one that makes it again.
        whole = folder.whole(keys)
        model.load_state_dict({name: whole[f"{MODEL}.{plain_name(name)}"] for name in state})
        return
    # They are made when a rank knows which of them it needs: reading them all would need the memory
    # of the whole model.
    if waiting:
        names = {value: [plain_name(name) for name in several] for value, several in own.items()}
        others = [key.removeprefix(f"{MODEL}.") for key in folder.tensors if _is_extra(key)]
        shelve(waiting, names, folder.path, others)
    with _loading(world):
        folder.fill(
            {
                key: value.detach()
                for key, value in keys.items()
                if not (_is_extra(key) or is_waiting(value) or _is_missing(value, world))
            }
        )
        # What a module keeps beside tensors has no place to be read into: it is read whole, and
        # given to it.
        extra = folder.whole(key for key in keys if _is_extra(key))
        for name in state:
            key = f"{MODEL}.{plain_name(name)}"
            if key in extra:
                model.get_submodule(name.rpartition(".")[0]).set_extra_state(extra[key])


def _state_without_values(model: nn.Module) -> dict[str, Any]:
    """What `state_dict()` has, where hooks and `get_extra_state` may not read values: of extra
    state only the names."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        buffers = module._buffers.items()
        tensors = [*module._parameters.items()]
        tensors += [pair for pair in buffers if pair[0] not in module._non_persistent_buffers_set]
        own = {name: value for name, value in tensors if value is not None}
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            own[_EXTRA] = None
        state |= {f"{path}.{name}" if path else name: value for name, value in own.items()}
    return state


def _is_extra(key: str) -> bool:
    """Whether a key is that of extra state, or of a part of it: torch takes dicts apart."""
    return f".{_EXTRA}." in f"{key}."


def _loading(world: World | None) -> contextlib.AbstractContextManager[None]:
    """While state changes, as in `load_state_dict`: other ranks may be about to read it."""
    return world.service.changing("loads of state") if world else contextlib.nullcontext()


def _check(keys: Mapping[str, Any], folder: Folder) -> None:
    """Extra state has no shape."""
    there: dict[str, Sequence[int]] = {}
    for key in folder.under(f"{MODEL}."):
        name, *_ = f"{key}.".partition(f".{_EXTRA}.")
        shape = () if _is_extra(key) or key in folder.objects else folder.tensors[key].shape
        there[f"{name}.{_EXTRA}" if _is_extra(key) else key] = shape
    wanted = {key: () if _is_extra(key) else value.shape for key, value in keys.items()}
    check_shapes(_without_prefix(wanted), _without_prefix(there), folder.path)


def _without_prefix(keys: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    return {key.removeprefix(f"{MODEL}."): shape for key, shape in keys.items()}


def _is_missing(value: Any, world: World | None) -> bool:
    if world is None or not isinstance(value, torch.Tensor):
        return False
    return world.ownership.foreign.lacks(value)


def load_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    names: Mapping[torch.Tensor, str],
    folder: Folder,
    world: World | None,
) -> None:
    """Reads the options of some optimizers' groups, and their state: on this rank that of what it
    trains, which may be known only when it steps. Raises ValueError for a parameter of which the
    folder has no options."""
    for optimizer in optimizers:
        groups, at = [], 0
        for group in optimizer.param_groups:
            params = group["params"]
            options = _options(name_in(names, params[0]), folder) if params else {}
            rest = {key: value for key, value in group.items() if key != "params"}
            groups.append({**rest, **options, "params": list(range(at, at + len(params)))})
            at += len(params)
        later = world is not None and not world.ownership.owns_any(_parameters(optimizer))
        state = {} if later else _state(optimizer, names, folder, world)
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        if later:
            _Later(optimizer, names, folder)


class _Later:
    """The state of an optimizer whose parameters no rank trains yet. It is read when it is first
    needed, for what this rank has come to train by then."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], folder: Folder
    ):
        self.names, self.folder = names, folder
        self.handles = [
            optimizer.register_step_pre_hook(self._now),
            optimizer.register_state_dict_pre_hook(self._now),
            optimizer.register_load_state_dict_pre_hook(self._cancel),
        ]

    def _cancel(self, *args: Any) -> None:
        """Other state has come."""
        while self.handles:
            self.handles.pop().remove()

    @torch.compiler.disable
    def _now(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        self._cancel()
        world = world_so_far()
        # The groups may have changed since, by a scheduler; only the state comes from the folder.
        packed = reading(world, optimizer.state_dict)
        state = _state(optimizer, self.names, self.folder, world)
        optimizer.load_state_dict({**packed, "state": state})


def _options(name: str, folder: Folder) -> dict[str, Any]:
    """The options of a parameter's group, as torch spells them: by the parameter if it was asked to
    flatten them, else by the numbers of groups."""
    prefix = f"{_OPTIONS}{name}."
    if not folder.under(prefix):
        members = [key for key in folder.under(_OPTIONS) if key.endswith(".params")]
        named = (key for key, params in folder.read(members).items() if name in params)
        prefix = next(named, "").removesuffix("params")
    if not prefix:
        raise ValueError(
            f"{folder.path} has no options of an optimizer for {name}: it was saved with one of "
            "other parameters, or with none"
        )
    options = folder.read(key for key in folder.under(prefix) if key != f"{prefix}params")
    return {key.removeprefix(prefix): value for key, value in options.items()}


def _state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    folder: Folder,
    world: World | None,
) -> dict[int, Any]:
    """The state of what this rank trains, by the places of the parameters."""
    own = _parameters(optimizer)
    prefixes = {
        at: f"{_STATE}{name_in(names, parameter)}."
        for at, parameter in enumerate(own)
        if _is_trained_here(parameter, world)
    }
    keys = {key: at for at, prefix in prefixes.items() for key in folder.under(prefix)}
    state: dict[int, Any] = {}
    for key, value in folder.read(keys).items():
        *parts, last = key.removeprefix(prefixes[keys[key]]).split(".")
        into = state.setdefault(keys[key], {})
        for part in parts:
            into = into.setdefault(part, {})
        into[last] = value
    return state


def _is_trained_here(tensor: torch.Tensor, world: World | None) -> bool:
    owned = owner_of(tensor, world)
    return owned is None or world is None or owned.trains(world.rank)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
