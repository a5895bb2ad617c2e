"""Models that something else distributes over the same ranks."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pfeife import _torch
from pfeife.runtime.distributed.fully_sharded import fully_sharded


def check_alone(roots: Iterable[Any], tensors: Iterable[Any] = ()) -> None:
    """Raises ValueError if DDP or FSDP wraps one of these modules, or runs this call, or if one of
    the tensors is a DTensor: they need all parameters on every rank, or have parts of each."""
    wrapper = next(itertools.chain(_wrappers(roots), _in_parts(roots, tensors)), None)
    if wrapper is not None:
        raise ValueError(
            f"{wrapper}, and a rank of a pipeline has the parameters of its own stages alone: "
            "leave that out (replicas= and data_parallel= do it for pipelines, members= and "
            "parallel= cut the layers of a stage). Whose loop does it by itself takes "
            "pipelined(Trainer, ...) of pfeife.integrations.transformers, Accelerator of "
            "pfeife.integrations.accelerate, or PipelineStrategy of pfeife.integrations.lightning"
        )


def is_wrapped(roots: Iterable[Any]) -> bool:
    """Whether DDP or FSDP's wrapper is around one of these modules, or runs this call."""
    return any(_wrappers(roots))


def _wrappers(roots: Iterable[Any]) -> Iterator[str]:
    """What is around modules, in words."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    # DDP calls the module's forward itself, so that the step sees the bare module: ask who runs.
    if (running := _torch.running_ddp()) is not None:
        yield _in_words(running, "", type(running.module))
    for root in roots:
        for name, module in root.named_modules() if isinstance(root, nn.Module) else ():
            if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
                yield _in_words(module, name, type(module.module))


def _in_parts(roots: Iterable[Any], tensors: Iterable[Any]) -> Iterator[str]:
    """What ranks have parts of, in words."""
    from torch.distributed.tensor import DTensor

    for name, _ in fully_sharded(root for root in roots if isinstance(root, nn.Module)):
        yield f"fully_shard (FSDP) shards {name}"
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            yield f"a DTensor of shape {list(tensor.shape)} is among the step's tensors"


def _in_words(wrapper: nn.Module, name: str, inner: type) -> str:
    where = f" ({name})" if name else ""
    return f"{type(wrapper).__name__} wraps {inner.__name__}{where}"
