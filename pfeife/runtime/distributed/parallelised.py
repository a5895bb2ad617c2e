"""Models that torch's `parallelize_module` or `fully_shard`, or Hugging Face's `tp_plan`, has cut
over ranks."""

import gc
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pfeife import _torch
from pfeife.factors import Place
from pfeife.runtime.distributed.fully_sharded import (
    as_replicas,
    dims_of_replicas,
    fully_sharded,
)
from pfeife.runtime.distributed.wrapped import is_wrapped

_PASSING = 1.0  # seconds for which nobody holds what is only looked at
_THEIRS = ("torch.distributed.tensor.", "torch.distributed.fsdp.", "transformers.distributed.")


def with_cuts(options: Mapping[str, Any], models: Sequence[nn.Module]) -> Mapping[str, Any]:
    """The options of a step whose models may be cut over ranks already: over so many members, and
    where they are; or, where `fully_shard` was called, over so many replicas. The models are made
    whole again, in place (collective): what told parts between modules is gone, for it follows from
    the parameters.

    Raises ValueError for other options, for what is cut over several dimensions of ranks or is a
    sum of parts, and if somebody else has the parameters that were: an optimizer would go on with
    these.
    """
    if not dist.is_available() or not dist.is_initialized() or is_wrapped(models):
        return options  # the call refuses what is wrapped, with its name
    sharded = fully_sharded(models)
    for _, module in sharded:
        module.reshard()  # after a forward some modules have whole parameters, and optimizers parts
    # By tensor: a module may be reached by itself and in another one.
    tensors = {id(t): (n, t) for model in reversed(models) for n, t in _in_parts(model).items()}
    if not tensors:
        return options
    if sharded:
        options = as_replicas(options, sharded, [*tensors.values()])
    before = dims_of_replicas if sharded else lambda tensor: 0
    cut_options = _over_members(options, [(n, t, before(t)) for n, t in tensors.values()])
    tensors.clear()  # who else has one of them is refused
    for model in models:
        _make_whole(model)
    return cut_options


def _over_members(
    options: Mapping[str, Any], tensors: Sequence[tuple[str, Any, int]]
) -> Mapping[str, Any]:
    """The options of a step whose parameters are cut over members; with each of the DTensors how
    many dimensions of its ranks are not of members. Raises ValueError for other options."""
    cuts = [_cut(*named) for named in tensors]
    members = max(size for _, size, _ in cuts)
    places = {name: place for name, _, place in cuts if place is not None}
    cut_so = {"members": members, "parallel": places} if members > 1 else {}
    for name, value in cut_so.items():
        if options.get(name, value) != value:
            raise ValueError(
                f"option {name}={options[name]!r}: the model is cut already, over {members} "
                f"ranks; leave {name} out"
            )
    return {**options, **cut_so}


def _in_parts(model: nn.Module) -> dict[str, Any]:
    """The DTensors of a model, by their names."""
    from torch.distributed.tensor import DTensor  # as heavy as all of torch.distributed

    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in tensors if isinstance(tensor, DTensor)}


def _make_whole(model: nn.Module) -> None:
    """Puts whole tensors in the place of a model's DTensors, and takes the hooks of these away."""
    cut = _in_parts(model)
    if not cut:
        return
    whole = {id(tensor): _whole(tensor) for tensor in cut.values()}
    for module in model.modules():
        _leave(module)
        _torch.leave_fully_shard(module)
        kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for own in kinds:
            for name in [name for name, tensor in own.items() if id(tensor) in whole]:
                own[name] = whole[id(own[name])]
    held = ""
    while cut and not held:
        name, tensor = cut.popitem()
        # Threads may look at all parameters in passing, as those that answer other ranks. What
        # nobody can reach holds nothing, unless another thread collects garbage at this moment.
        ends = time.monotonic() + _PASSING
        while sys.getrefcount(tensor) > 2:  # by this function and the call
            if time.monotonic() > ends:
                held = f"{name} was cut over ranks, and {_holder(tensor)}"
                break
            gc.collect()
            time.sleep(0.01)
    # All ranks go on, or none.
    device = next(iter(whole.values())).device
    on_ranks = torch.tensor([float(bool(held))], device=device)
    dist.all_reduce(on_ranks)
    if on_ranks.item():
        raise ValueError(held or "on another rank something still has a part of a parameter")


def _holder(tensor: Any) -> str:
    """What still has a tensor that was a part, and what to do."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        names = [name for name, value in frame.f_locals.items() if value is tensor]
        if names and frame.f_code.co_filename != __file__:
            where = f"{frame.f_code.co_filename}, {frame.f_code.co_name}"
            return f"the variable {names[0]} ({where}) has it as it was: `del {names[0]}` before"
        frame = frame.f_back
    return (
        "something still has it as it was, as an optimizer does that was made before: call "
        "pfeife.compile first, and make optimizers then"
    )


def _cut(name: str, tensor: Any, after: int) -> tuple[str, int, Place | None]:
    """The name of a DTensor, over how many ranks it is cut, and where, None if each has the whole
    of it."""
    pairs = [*zip(tensor.placements, tensor.device_mesh.shape, strict=True)][after:]
    cuts = [(placement, size) for placement, size in pairs if not placement.is_replicate()]
    if not cuts:
        return name, 1, None
    (placement, size), *more = cuts
    if more or not hasattr(placement, "dim"):
        raise ValueError(
            f"{name} is a DTensor of {list(tensor.placements)}: pfeife takes models that are cut "
            "along one dimension over one dimension of ranks; leave the others out (replicas= and "
            "data_parallel= do it for pipelines)"
        )
    # torch cuts products of several in blocks, as of queries and keys, by a class of its own.
    return name, size, Place(placement.dim, getattr(placement, "split_factor", 1))


def _whole(tensor: Any) -> torch.Tensor:
    """A plain tensor of all values, with the attributes that a script gave it, and its gradient."""
    whole: torch.Tensor = tensor.detach().full_tensor()
    if isinstance(tensor, nn.Parameter):
        whole = nn.Parameter(whole, requires_grad=tensor.requires_grad)
    vars(whole).update(vars(tensor))
    whole.grad = None if tensor.grad is None else tensor.grad.full_tensor()
    return whole


def _leave(module: nn.Module) -> None:
    """Takes the hooks away, and the forwards, that turn tensors into parts and back."""
    kinds: tuple[dict[int, Any], ...] = (module._forward_pre_hooks, module._forward_hooks)
    for hooks in kinds:
        for number, hook in list(hooks.items()):
            if _is_theirs(hook):
                for others in (hooks, *_flags(module)):
                    others.pop(number, None)
    if _is_theirs(vars(module).get("forward")):
        del module.forward


def _flags(module: nn.Module) -> Iterable[dict[int, Any]]:
    """What torch notes of hooks beside them."""
    return (
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    )


def _is_theirs(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(_THEIRS)
