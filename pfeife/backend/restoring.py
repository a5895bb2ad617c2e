"""What is read of a checkpoint: the model and its optimizers, by the names of parameters."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pfeife.frontend.arguments import aliases
from pfeife.frontend.checkpoint_folder import Folder
from pfeife.frontend.deferred import materialize
from pfeife.frontend.waiting import deferred_tensors
from pfeife.runtime.distributed.process_group import world_so_far
from pfeife.runtime.distributed.shares import name_in, owner_of, reading
from pfeife.runtime.distributed.world import World

MODEL, OPTIMIZER = "model", "optim"
_OPTIONS, _STATE = f"{OPTIMIZER}.param_groups.", f"{OPTIMIZER}.state."
_EXTRA = "_extra_state"  # what torch calls it


def plain_name(name: str) -> str:
    """A name as it is without torch.compile around the model."""
    return name.replace("_orig_mod.", "")


def names_of(model: nn.Module) -> dict[torch.Tensor, str]:
    """The first name of every parameter."""
    return {one: plain_name(name) for name, one in model.named_parameters()}


def load_model(model: nn.Module, folder: Folder, world: World | None) -> None:
    """Reads a model's state in place: on this rank what no other one trains alone. If the model was
    made without values, they are read when they are needed. Raises ValueError for a name that only
    one of the two has, and for another shape."""
    if deferred_tensors(model):
        materialize(model, checkpoint=folder.path, later=True)
        return
    state = reading(world, lambda: model.state_dict(keep_vars=True))
    keys = {f"{MODEL}.{plain_name(name)}": one for name, one in state.items()}
    _check(keys, folder)
    own = aliases(model)
    if not all(id(one) in own or key.endswith(_EXTRA) for key, one in keys.items()):
        # A hook has made something else of the state: there is one that makes it again.
        whole = folder.read(keys)
        model.load_state_dict({name: whole[f"{MODEL}.{plain_name(name)}"] for name in state})
        return
    mine = {key: one for key, one in keys.items() if not _is_missing(one, world)}
    with _loading(world):
        folder.fill({key: one.detach() for key, one in mine.items() if key in folder.tensors})
        for key, value in folder.read(key for key in mine if key in folder.objects).items():
            path = key.removeprefix(f"{MODEL}.").rpartition(".")[0]
            model.get_submodule(path).set_extra_state(value)


@contextlib.contextmanager
def _loading(world: World | None) -> Iterator[None]:
    """While state changes, as in `load_state_dict`: other ranks may be about to read it."""
    if world is None:
        yield
        return
    world.service.begin("loads of state")
    try:
        yield
    finally:
        world.service.script.end("loads of state")


def _check(keys: Mapping[str, Any], folder: Folder) -> None:
    there = folder.under(f"{MODEL}.")
    for these, others, where in ((there, keys, "the model"), (keys, there, str(folder.path))):
        known = set(others)
        lost = [key.removeprefix(f"{MODEL}.") for key in these if key not in known]
        if lost:
            raise ValueError(f"{where} has no {lost[:3]} ({len(lost)} in all)")
    for key, one in keys.items():
        if key in folder.tensors and folder.tensors[key].shape != one.shape:
            raise ValueError(
                f"{key.removeprefix(f'{MODEL}.')} is {list(folder.tensors[key].shape)} in "
                f"{folder.path} and {list(one.shape)} in the model"
            )


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
            told = _options(name_in(names, params[0]), folder) if params else {}
            rest = {key: value for key, value in group.items() if key != "params"}
            groups.append({**rest, **told, "params": list(range(at, at + len(params)))})
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
    found = folder.read(key for key in folder.under(prefix) if key != f"{prefix}params")
    return {key.removeprefix(prefix): value for key, value in found.items()}


def _state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    folder: Folder,
    world: World | None,
) -> dict[int, Any]:
    """The state of what this rank trains, by the places of the parameters."""
    own = _parameters(optimizer)
    prefixes = {
        at: f"{_STATE}{name_in(names, one)}."
        for at, one in enumerate(own)
        if _is_trained_here(one, world)
    }
    keys = {key: at for at, prefix in prefixes.items() for key in folder.under(prefix)}
    found: dict[int, Any] = {}
    for key, value in folder.read(keys).items():
        *parts, last = key.removeprefix(prefixes[keys[key]]).split(".")
        into = found.setdefault(keys[key], {})
        for part in parts:
            into = into.setdefault(part, {})
        into[last] = value
    return found


def _is_trained_here(one: torch.Tensor, world: World | None) -> bool:
    owned = owner_of(one, world)
    return owned is None or world is None or owned.trains(world.rank)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]
