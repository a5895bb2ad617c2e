"""What a rank has of the state that ranks train together: what it writes to a checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pfeife.runtime.distributed.liveness.heartbeat import Activity
from pfeife.runtime.distributed.state.owned import Owned
from pfeife.runtime.distributed.world.state_sync import agree_on, news_of
from pfeife.runtime.distributed.world.world import World


def all_state(
    model: nn.Module,
    world: World,
    what: str,
    extra: str = "",
    refused: Exception | None = None,
) -> dict[str, Any]:
    """A model's `state_dict()` with the tensors themselves, absent where others have them; all
    ranks give `what` they do this for, and the same `extra` text (collective). Raises
    CollectiveError where ranks have other names, one has written to state that others train, or one
    has `refused`."""
    refused = refused or world.service.wrong()
    with world.busy(lambda: Activity(what)):
        state = reading(world, lambda: model.state_dict(keep_vars=True))
        values = list(state.values())
        news = news_of(world.ownership, None, values)
        text = "\n".join([*state, extra])
        agreed = world.agreed(text, f"the names in {what}", note=news, refused=refused)
        agree_on(world.ownership, world, agreed.notes, args=values)
        world.ownership.adopt_derived(state, world)
    return state


def reading(world: World | None, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `state_dict()` gives where nobody is asked for what other ranks have."""
    if world is None:
        return read()
    foreign = world.ownership.foreign
    foreign.reading = True
    try:
        return read()
    finally:
        foreign.reading = False


def owner_of(value: Any, world: World | None) -> Owned | None:
    """Who trains a tensor; None for one that nobody does, and for other values."""
    is_owned = (
        isinstance(value, torch.Tensor) and world is not None and value in world.ownership.known
    )
    return world.ownership.known[value] if is_owned and world is not None else None


def share_of_model(model: nn.Module, state: Mapping[str, Any], world: World) -> dict[str, Any]:
    """What this rank writes of `all_state`: what it trains and what all ranks have, of which
    torch.distributed.checkpoint takes one. Raises what `check_hooks` does."""
    check_hooks(model, state, world)
    lacks = world.ownership.foreign.lacks
    share = {}
    for name, value in state.items():
        owned = owner_of(value, world)
        # torch writes a value once, whichever rank gives it, so that all may give what all have.
        if owned is not None and (lacks(value) or not _writes(owned, world.rank)):
            continue
        share[name] = value.detach() if isinstance(value, torch.Tensor) else value
    return share


def _writes(owned: Owned, rank: int) -> bool:
    """Statistics of replicas, which differ, are those of the first."""
    return owned.alike or owned.first == rank


def check_hooks(model: nn.Module, state: Mapping[str, Any], world: World) -> None:
    """Raises ValueError where a hook of `state_dict()` has changed what other ranks train."""
    lacks = world.ownership.foreign.lacks
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if lacks(tensor) and name in state and state[name] is not tensor:
            raise ValueError(
                f"a hook of state_dict() has changed {name}, which other ranks train and has no "
                "values here: change what was loaded, or what pfeife.full_state_dict(model) returns"
            )


def share_of_optimizers(
    names: Mapping[torch.Tensor, str],
    optimizers: Sequence[torch.optim.Optimizer],
    world: World | None,
) -> dict[str, Any]:
    """The state of some optimizers for what this rank trains, by the names of parameters, in the
    form of torch.distributed.checkpoint.state_dict.get_optimizer_state_dict. Raises ValueError for
    a parameter that has no name."""
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        packed = reading(world, optimizer.state_dict)
        for group, packed_group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
            named = [name_in(names, parameter) for parameter in group["params"]]
            groups.append({**packed_group, "params": named})
            for index, name in zip(packed_group["params"], named, strict=True):
                if index in packed["state"]:
                    state[name] = packed["state"][index]
    return {"state": state, "param_groups": groups}


def name_in(names: Mapping[torch.Tensor, str], parameter: torch.Tensor) -> str:
    """A parameter's name. Raises ValueError if it has none."""
    if parameter not in names:
        raise ValueError(
            f"an optimizer has a parameter {list(parameter.shape)} that the model does not have: "
            "give the module that has all of them"
        )
    return names[parameter]
