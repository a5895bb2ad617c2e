"""What reads the state of all ranks: collective where several processes train it in parts."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from pfeife._torch import is_absent
from pfeife.runtime.distributed.liveness.heartbeat import Activity
from pfeife.runtime.distributed.process_group import world_so_far
from pfeife.runtime.distributed.state.owned import Owned
from pfeife.runtime.distributed.state.remote_gradients import is_here
from pfeife.runtime.distributed.world.shares import all_state, owner_of
from pfeife.runtime.distributed.world.world import World


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The model's `state_dict()` with everything that has been trained, as copies on the CPU.

    Under torchrun all ranks must call it, and each gets the whole; every tensor comes from the
    first rank that trains it, or trains what it is a copy of, such as a moving average. In one
    process it is a copy of `state_dict()`. Raises ValueError where a rank has written to state that
    others train, or calls something else than the others, PipelineError if a rank does not call it.
    """
    world = world_so_far()
    if world is None:
        return {name: _copied(value) for name, value in model.state_dict().items()}
    state = all_state(model, world, "full_state_dict")
    with world.busy(lambda: Activity("full_state_dict")):
        copies: dict[int, Any] = {}  # tied tensors are one, as in state_dict()
        for value in state.values():
            if id(value) not in copies:
                copies[id(value)] = _whole(value, world)
        return {name: copies[id(value)] for name, value in state.items()}


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _whole(value: Any, world: World) -> Any:
    """A value from the first rank that trains it."""
    owned = owner_of(value, world)
    if owned is None:
        return _copied(value)
    whole = torch.empty(value.shape, dtype=value.dtype, device=world.device)
    # Only the rank that sends needs values; on others this may be the absent tensor.
    if not is_absent(value):
        whole.copy_(value.detach())
    world.broadcast(whole.reshape(-1).view(torch.uint8), owned.first)
    return whole.to("cpu")


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` with the norm of the gradients of all ranks.

    Under torchrun all ranks must call it with the same parameters; a gradient that several ranks
    have counts once. Returns the norm, the same on every rank. Raises RuntimeError for a norm
    that is not finite if `error_if_nonfinite`, ValueError if ranks call it with other arguments or
    call something else, PipelineError if a rank does not call it.
    """
    is_tensor = isinstance(parameters, torch.Tensor)
    listed: list[Any] = [parameters] if is_tensor else list(parameters)
    world = world_so_far()
    owned = [owner_of(parameter, world) for parameter in listed]
    if world is None or not any(owned):
        return torch.nn.utils.clip_grad_norm_(
            listed, max_norm, norm_type, error_if_nonfinite, foreach
        )
    with world.busy(lambda: Activity("clip_grad_norm_")):
        arguments = f"{len(listed)} tensors, max_norm={max_norm}, norm_type={norm_type}"
        world.agreed(arguments, "the arguments of clip_grad_norm_")
        norms = _norms(listed, owned, float(norm_type), world)
    # As torch does it: the norm of the norms.
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for the gradients of all ranks is non-finite, so "
            "it cannot be clipped"
        )
    torch.nn.utils.clip_grads_with_norm_(listed, max_norm, total, foreach)
    return total


def _norms(
    parameters: Sequence[torch.Tensor], owners: Sequence[Owned | None], kind: float, world: World
) -> list[torch.Tensor]:
    """The norm of each gradient that there is, on every rank, in the parameters' order and in
    their dtypes, as torch adds them up in one process."""
    norms = torch.full((len(parameters),), -1.0, dtype=torch.float64, device=world.device)
    for at, parameter in enumerate(parameters):
        if is_here(parameter.grad):
            norms[at] = torch.linalg.vector_norm(parameter.grad.detach(), kind)
    by_rank = world.gather(norms)
    counted = [
        (by_rank[owned.first if owned else 0][at], parameter)
        for at, (parameter, owned) in enumerate(zip(parameters, owners, strict=True))
    ]
    return [
        norm.to(parameter.device, parameter.dtype)
        for norm, parameter in counted
        if not norm < 0  # NaN is a norm
    ]
