"""Models that torch's `fully_shard` has shared out over ranks: replicas that share out state."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pfeife import _torch
from pfeife.data.machine import Mesh
from pfeife.runtime.distributed.batches.meshes import mesh_of


def fully_sharded(models: Iterable[nn.Module]) -> list[tuple[str, Any]]:
    """The modules of these that `fully_shard` was called on, with their names."""
    from torch.distributed.fsdp import FSDPModule  # as heavy as all of torch.distributed

    modules = (pair for model in models for pair in model.named_modules())
    return [(name or type(m).__name__, m) for name, m in modules if isinstance(m, FSDPModule)]


def ranks_of(
    sharded: Sequence[tuple[str, nn.Module]], tensors: Sequence[tuple[str, Any]]
) -> torch.Tensor:
    """The ranks that have parts of the DTensors of models in which `fully_shard` was called on some
    modules, [replicas, members], both with their names; those that are cut over members besides
    have a mesh of both. Raises ValueError for precisions, and for parts of other ranks."""
    for name, module in sharded:
        _check_precision(name, module)
    grids = [_ranks_of(name, tensor) for name, tensor in tensors]
    grid = max(grids, key=lambda grid: grid.size(1))
    own = [column for column in grid.unbind(1) if dist.get_rank() in column]
    for (name, _), other in zip(tensors, grids, strict=True):
        if not torch.equal(other, grid) and not torch.equal(other.flatten(), own[0]):
            raise ValueError(
                f"fully_shard has put {name} on the ranks {other.tolist()}, and others on "
                f"{grid.tolist()}: pfeife takes models of which each parameter is on the same ones"
            )
    return grid


def as_replicas(options: Mapping[str, Any], mesh: Mesh) -> Mapping[str, Any]:
    """The options for models that `fully_shard` has shared out over the replicas of a mesh, which
    share out state, and each of which gives its own batch. Raises ValueError for others."""
    chosen = mesh_of(options.get("mesh"))
    if chosen is not None and _replicas(chosen) != _replicas(mesh):
        raise ValueError(
            f"option mesh={options['mesh']!r}: its replicas are the ranks {_in_words(chosen)}, and "
            f"fully_shard has shared out the model over the ranks {_in_words(mesh)}"
        )
    if options.get("replicas", mesh.replicas) != mesh.replicas:
        raise ValueError(
            f"option replicas={options['replicas']}: fully_shard has shared out the model over "
            f"{mesh.replicas} ranks; leave replicas out"
        )
    return {"data_parallel": "shard", "batch": "replica", "mesh": mesh, **options}


def _check_precision(name: str, module: nn.Module) -> None:
    policy = _torch.precision_of_shards(module)
    dtypes = ("param_dtype", "reduce_dtype", "output_dtype")
    if any(getattr(policy, dtype, None) is not None for dtype in dtypes):
        raise ValueError(
            f"fully_shard of {name} has {policy}: leave mp_policy out, and say "
            "param_dtype='bfloat16' to pfeife.compile, which casts what a step computes with and "
            "adds gradients up in float32"
        )


def _ranks_of(name: str, tensor: Any) -> torch.Tensor:
    """The ranks that have parts of a DTensor, [replicas, members]."""
    mesh: DeviceMesh = tensor.device_mesh
    if tensor.device.type != mesh.device_type:
        raise ValueError(
            f"fully_shard has put {name} on {tensor.device.type}, and its ranks compute on "
            f"{mesh.device_type}: give parameters values there before pfeife.compile is called, "
            "and leave offload_policy out"
        )
    outer = dims_of_replicas(tensor)
    if mesh.ndim > outer + 1:
        raise ValueError(
            f"fully_shard has put {name} over a mesh of {mesh.ndim} dimensions, "
            f"{list(tensor.placements)}: pfeife takes those of fully_shard, and one over which "
            "parallelize_module has cut; leave the others out"
        )
    return mesh.mesh.view(torch.Size(mesh.shape[:outer]).numel(), -1)


def dims_of_replicas(tensor: Any) -> int:
    """How many dimensions of a DTensor's ranks are those of `fully_shard`, which come first: one
    over which it cuts every parameter, behind one of copies (HSDP)."""
    return 2 if tensor.placements[0].is_replicate() else 1


def all_replicas(grid: torch.Tensor, device: torch.device) -> Mesh:
    """All ranks, those of a column as replicas of one another (collective)."""
    own = grid.to(device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    grids = sorted({tuple(map(tuple, part.tolist())) for part in parts})
    order = tuple(rank for pipeline in zip(*grids, strict=True) for row in pipeline for rank in row)
    return Mesh(len(grids), len(grid), order, grid.size(1))


def _replicas(mesh: Mesh) -> set[frozenset[int]]:
    """Which ranks do the same work for other batches."""
    of_members = (zip(*each.pipelines, strict=True) for each in mesh.each_member)
    return {frozenset(ranks) for replicas in of_members for ranks in replicas}


def _in_words(mesh: Mesh) -> str:
    return " and ".join(str(sorted(ranks)) for ranks in sorted(map(sorted, _replicas(mesh))))
