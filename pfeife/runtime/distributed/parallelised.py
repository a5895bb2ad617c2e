"""Models that torch's `parallelize_module` or `fully_shard`, or Hugging Face's `tp_plan`, has cut
over ranks."""

import functools
import gc
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pfeife import _torch
from pfeife.data.machine import Mesh
from pfeife.factors import Place
from pfeife.runtime.distributed.fully_sharded import (
    all_replicas,
    as_replicas,
    dims_of_replicas,
    fully_sharded,
    ranks_of,
)
from pfeife.runtime.distributed.process_group import join_world, joined
from pfeife.runtime.distributed.world.together import together
from pfeife.runtime.distributed.wrapped import is_wrapped

Cut = tuple[int, Place | None]
_MODEL = "a model that is cut over ranks"
_PASSING = 1.0  # seconds for which nobody holds what is only looked at, and
_COLLECTIONS = 5  # how often garbage is collected meanwhile, at least
_THEIRS = ("torch.distributed.tensor.", "torch.distributed.fsdp.", "transformers.distributed.")


def with_cuts(options: Mapping[str, Any], models: Iterable[nn.Module]) -> Mapping[str, Any]:
    """The options of a step whose models may be cut over ranks already: over so many members, and
    where they are; or, where `fully_shard` was called, over so many replicas. The models are made
    whole again, in place (collective): what told parts between modules is gone, for it follows from
    the parameters.

    Raises ValueError for other options, for what is cut over several dimensions of ranks or is a
    sum of parts, and if somebody else has the parameters that were: an optimizer would go on with
    these.
    """
    if not dist.is_available() or not dist.is_initialized():
        return options
    models = [*models]
    if is_wrapped(models):
        return options  # the call refuses it, with its name
    sharded = fully_sharded(models)
    for _, module in sharded:
        module.reshard()  # after a forward some modules have whole parameters, and optimizers parts
    # By tensor: a module may be reached by itself and in another one.
    named = {id(t): (n, t) for model in reversed(models) for n, t in _in_parts(model).items()}
    if not named:
        return _as_before(options, models)
    tensors = [*named.values()]
    device = torch.device(tensors[0][1].device_mesh.device_type)
    world = join_world(device, options.get("timeout"))
    grid, cuts = together(lambda: _read(sharded, tensors), world, _MODEL)
    mesh = None if grid is None else all_replicas(grid, device)
    options = together(lambda: _taken_over(options, cuts, mesh), world, _MODEL)
    named.clear()  # who else has one of the tensors is refused
    tensors.clear()
    for model in models:
        parts = _in_parts(model)
        whole = _make_whole(model, parts)
        if world is not None:
            world.ownership.cut_before.update({t: (options, cuts[n]) for n, t in whole.items()})
        # After that: whoever lets go of a part calls pfeife.compile once more.
        together(functools.partial(_check_let_go, parts), world, _MODEL)
    return options


def _parameters(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for model in models:
        yield from model.named_parameters(remove_duplicate=False)


def _as_before(options: Mapping[str, Any], models: Sequence[nn.Module]) -> Mapping[str, Any]:
    """The options of a step whose models have been made whole for another one."""
    world = joined()
    cut_before = {} if world is None else world.ownership.cut_before
    before = [(name, *cut_before[p]) for name, p in _parameters(models) if p in cut_before]
    if not before:
        return options
    _, same, _ = before[0]
    names = ("data_parallel", "batch", "mesh", "members")
    own = {name: same[name] for name in names if name in same}
    if own.get("members", 1) > 1:
        own["parallel"] = {name: place for name, _, (_, place) in before if place is not None}
    return {**own, **options}


def _read(
    sharded: Sequence[tuple[str, nn.Module]], tensors: Sequence[tuple[str, Any]]
) -> tuple[torch.Tensor | None, dict[str, Cut]]:
    """The ranks that `fully_shard` has shared the DTensors out over, [replicas, members], None if
    it was not called, and where they are cut over members. Raises ValueError for what cannot be
    taken over."""
    for name, tensor in tensors:
        if _torch.hooks_of(tensor):
            raise ValueError(
                f"{name} has hooks, which would be gone with its parts: register them after "
                "pfeife.compile"
            )
    outer = dims_of_replicas if sharded else lambda tensor: 0
    grid = ranks_of(sharded, tensors) if sharded else None
    return grid, {name: _cut(name, tensor, outer(tensor)) for name, tensor in tensors}


def _taken_over(
    options: Mapping[str, Any], cuts: Mapping[str, Cut], mesh: Mesh | None
) -> Mapping[str, Any]:
    """The options of a step whose parameters are cut over members, and shared out over the replicas
    of a mesh. Raises ValueError for others."""
    if mesh is not None:
        options = as_replicas(options, mesh)
    members = max(size for size, _ in cuts.values())
    places = {name: place for name, (_, place) in cuts.items() if place is not None}
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


def _make_whole(model: nn.Module, parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Puts whole tensors, which it returns, in the place of a model's DTensors, and takes the hooks
    of these away (collective)."""
    if not parts:
        return {}
    whole = {id(tensor): _whole(tensor) for tensor in parts.values()}
    for module in model.modules():
        _leave(module)
        _torch.leave_fully_shard(module)
        kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for own in kinds:
            for name in [name for name, tensor in own.items() if id(tensor) in whole]:
                own[name] = whole[id(own[name])]
    return {name: whole[id(tensor)] for name, tensor in parts.items()}


def _check_let_go(parts: dict[str, Any]) -> None:
    """Raises ValueError if somebody else has one of the tensors that were parts, of which nothing
    is left here."""
    while parts:
        name, tensor = parts.popitem()
        # Threads may look at all parameters in passing, as those that answer other ranks. What
        # nobody can reach holds nothing, unless another thread collects garbage at this moment.
        # On a busy machine one collection takes longer than all of the time.
        ends, collections = time.monotonic() + _PASSING, 0
        while sys.getrefcount(tensor) > 2:  # by this function and the call
            if time.monotonic() > ends and collections >= _COLLECTIONS:
                raise ValueError(f"{name} was cut over ranks, and {_holder(tensor)}")
            gc.collect()
            collections += 1
            time.sleep(0.01)


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


def _cut(name: str, tensor: Any, after: int) -> Cut:
    """Over how many members a DTensor is cut, `after` some dimensions of ranks, and where, None if
    each has the whole of it."""
    pairs = [*zip(tensor.placements, tensor.device_mesh.shape, strict=True)][after:]
    cuts = [(placement, size) for placement, size in pairs if not placement.is_replicate()]
    if not cuts:
        return 1, None
    (placement, size), *more = cuts
    if more or not hasattr(placement, "dim"):
        raise ValueError(
            f"{name} is a DTensor of {list(tensor.placements)}: pfeife takes models that are cut "
            "along one dimension over one dimension of ranks; leave the others out (replicas= and "
            "data_parallel= do it for pipelines)"
        )
    # torch cuts products of several in blocks, as of queries and keys, by a class of its own.
    return size, Place(placement.dim, getattr(placement, "split_factor", 1))


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
