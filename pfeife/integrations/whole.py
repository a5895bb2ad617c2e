"""The state of an optimizer whose parameters several ranks train, as one device has it."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from pfeife.runtime.distributed.heartbeat import Doing
from pfeife.runtime.distributed.process_group import world_so_far
from pfeife.runtime.distributed.world import World

_WHAT = "the optimizer's state of all ranks"


def full_optimizer_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's `state_dict()` with the state of all parameters, on the CPU.

    Under torchrun all ranks must call it, and each gets the whole: that of a parameter comes from
    the first rank that trains it. In one process it is `state_dict()`. Raises ValueError for state
    that is neither a tensor, a number, a text nor None, or if ranks call something else or have
    other groups of parameters; PipelineError if a rank does not call it.
    """
    world, mine = world_so_far(), optimizer.state_dict()
    if world is None:
        return mine
    with world.busy(lambda: Doing("full_optimizer_state_dict")):
        owners = dict(_owners(optimizer, world))
        refused = _refused(mine["state"], owners, world.rank)
        world.agreed(repr(mine["param_groups"]), _WHAT, refused=refused)
        told = [json.loads(text) for text in world.from_all_ranks(_described(mine["state"]))]
        state = {}
        for at, owner in owners.items():
            slots = told[owner].get(str(at))
            if slots is not None:
                values = mine["state"].get(at, {})
                state[at] = {
                    name: _whole(form, values.get(name), owner, world)
                    for name, form in slots.items()
                }
    return {**mine, "state": state}


def _owners(optimizer: torch.optim.Optimizer, world: World) -> Iterator[tuple[int, int]]:
    """The number of each parameter in a state_dict, and the rank whose state of it counts."""
    parameters = (one for group in optimizer.param_groups for one in group["params"])
    for at, parameter in enumerate(parameters):
        owned = world.ownership.known.get(parameter)
        yield at, owned.first if owned else 0


def _refused(
    state: Mapping[int, Mapping[str, Any]], owners: Mapping[int, int], rank: int
) -> ValueError | None:
    """Why this rank cannot say what it keeps."""
    for at, slots in state.items():
        for name, value in slots.items():
            if owners.get(at) == rank and not isinstance(value, torch.Tensor | _PLAIN):
                return ValueError(
                    f"the optimizer keeps {name}, a {type(value).__name__}, for parameter {at}: "
                    "only tensors, numbers, texts and None can be gathered from the ranks that "
                    "train the parameters"
                )
    return None


_PLAIN = int | float | str | None


def _described(state: Mapping[int, Mapping[str, Any]]) -> str:
    """What this rank keeps, as text: a tensor by its dtype and shape, all else as it is."""
    return json.dumps(
        {
            at: {
                name: {"dtype": str(value.dtype), "shape": list(value.shape)}
                if isinstance(value, torch.Tensor)
                else {"value": value if isinstance(value, _PLAIN) else None}
                for name, value in slots.items()
            }
            for at, slots in state.items()
        }
    )


def _whole(form: Mapping[str, Any], mine: Any, owner: int, world: World) -> Any:
    """A value of rank `owner`, on every rank (collective for a tensor)."""
    if "value" in form:
        return form["value"]
    dtype = getattr(torch, form["dtype"].removeprefix("torch."))
    if world.rank == owner:
        found = mine.detach().to(world.device).contiguous().clone()
    else:
        found = torch.empty(form["shape"], dtype=dtype, device=world.device)
    world.broadcast(found.reshape(-1).view(torch.uint8), owner)
    return found.to("cpu")


@contextlib.contextmanager
def whole_state_dicts(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """While each optimizer's `state_dict()` is that of all ranks, also where one rank alone asks
    for it (collective at the beginning). A wrapper has its `optimizer` in it."""
    with contextlib.ExitStack() as stack:
        for wrapped in optimizers:
            optimizer = getattr(wrapped, "optimizer", wrapped)
            whole = full_optimizer_state_dict(optimizer)
            hook = optimizer.register_state_dict_post_hook(lambda *_, whole=whole: whole)
            stack.callback(hook.remove)
        yield


def together(what: str) -> None:
    """Waits until all ranks are here. Raises ValueError if one calls something else, PipelineError
    if one does not come."""
    world = world_so_far()
    if world is not None:
        with world.busy(lambda: Doing(what)):
            world.agreed("", what)
