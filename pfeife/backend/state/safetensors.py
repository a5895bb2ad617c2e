"""A model as files of safetensors with an index, as Hugging Face has large models."""

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from pfeife.backend.state.restoring import plain_name
from pfeife.data import files
from pfeife.runtime.distributed.liveness.heartbeat import Activity
from pfeife.runtime.distributed.process_group import world_so_far
from pfeife.runtime.distributed.world.shares import all_state, check_hooks, owner_of
from pfeife.runtime.distributed.world.together import together
from pfeife.runtime.distributed.world.world import World

INDEX = "model.safetensors.index.json"


@attrs.frozen
class Shard:
    """One file: the rank that writes it, and its tensors by their names."""

    rank: int
    tensors: Mapping[str, torch.Tensor]


def save_safetensors(
    model: nn.Module, folder: str | os.PathLike[str], shard_bytes: int = 5 * 10**9
) -> None:
    """Writes a model's `state_dict()` to a folder that `from_pretrained` loads, once the model's
    configuration is there too (`model.config.save_pretrained(folder)`), and
    `pfeife.materialize(model, checkpoint=folder)`.

    The files have at most `shard_bytes` each, or one larger tensor; a tied tensor is there once, by
    its first name. Under torchrun all ranks must call it; each writes what it trains, to a folder
    that all see. The index is written last. Raises ValueError, on all ranks, if the folder has a
    model already, for a state of other things than tensors, and if a rank cannot write;
    PipelineError if one does not come.
    """
    folder, world = Path(folder), world_so_far()
    state = (
        all_state(model, world, "save_safetensors") if world else model.state_dict(keep_vars=True)
    )
    _on_all_ranks(lambda: _check(folder, model, state, world), world)
    shards = _shards({plain_name(name): value for name, value in state.items()}, world, shard_bytes)
    count = len(shards)
    names = [f"model-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)]
    named = dict(zip(names if count > 1 else ["model.safetensors"], shards, strict=True))
    _on_all_ranks(lambda: _write(folder, named, world), world)
    # Last: a folder without an index was not finished.
    _on_all_ranks(lambda: _write_index(folder, named, world), world)


def _check(folder: Path, model: nn.Module, state: Mapping[str, Any], world: World | None) -> None:
    if world is not None:
        check_hooks(model, state, world)
    folder.mkdir(parents=True, exist_ok=True)
    there = sorted(file.name for file in folder.glob("*.safetensors*"))
    if there:
        raise ValueError(f"{folder} has {there[0]} already: give a new folder")
    other = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if other:
        raise ValueError(f"{other[0]} is no tensor, and safetensors have nothing else")


def _shards(state: Mapping[str, Any], world: World | None, largest: int) -> list[Shard]:
    """All ranks make the same of it: every tensor is written by the first rank that trains it."""
    names: dict[int, str] = {}  # a tied tensor once
    for name, tensor in state.items():
        names.setdefault(id(tensor), name)
    by_rank: dict[int, list[dict[str, torch.Tensor]]] = {}
    room: dict[int, int] = {}  # in the last file of a rank
    for name in names.values():
        tensor, owned = state[name].detach(), owner_of(state[name], world)
        rank = owned.first if owned else 0
        shards = by_rank.setdefault(rank, [])
        if not shards or room[rank] < tensor.nbytes:
            shards.append({})
            room[rank] = largest
        shards[-1][name] = tensor
        room[rank] -= tensor.nbytes
    return [Shard(rank, tensors) for rank in sorted(by_rank) for tensors in by_rank[rank]]


def _write(folder: Path, shards: Mapping[str, Shard], world: World | None) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ValueError("files of safetensors need that package: pip install it") from error
    for name, shard in shards.items():
        if world is None or shard.rank == world.rank:
            beside = folder / f".{name}.new"
            tensors = {key: _dense(tensor) for key, tensor in shard.tensors.items()}
            save_file(tensors, beside, metadata={"format": "pt"})
            # On the disk before it has its name, so that a crash leaves no half of a file behind
            # that looks whole.
            with beside.open("rb") as file:
                os.fsync(file.fileno())
            beside.replace(folder / name)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in memory of its own: safetensors refuse views of a larger one."""
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


def _write_index(folder: Path, shards: Mapping[str, Shard], world: World | None) -> None:
    """On rank 0."""
    if len(shards) > 1 and not (world and world.rank):
        tensors = [tensor for shard in shards.values() for tensor in shard.tensors.values()]
        where = {key: name for name, shard in shards.items() for key in shard.tensors}
        total = {"total_size": sum(tensor.nbytes for tensor in tensors)}
        text = json.dumps({"metadata": total, "weight_map": where}, indent=2, sort_keys=True)
        files.write_text(folder / INDEX, text)


def _on_all_ranks(do: Callable[[], None], world: World | None) -> None:
    """Does something; if that fails on any rank, all raise a ValueError."""
    with world.busy(lambda: Activity("save_safetensors")) if world else contextlib.nullcontext():
        together(lambda: _refusing(do), world, "save_safetensors")


def _refusing(do: Callable[[], None]) -> None:
    """Does something. Raises ValueError for whatever fails: the errors of safetensors have no class
    in common."""
    try:
        do()
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"the model was not written: {type(error).__name__}: {error}") from error
