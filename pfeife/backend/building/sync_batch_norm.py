"""SyncBatchNorm, which asks other processes for theirs in the middle of a stage."""

from collections.abc import Iterable

from torch import nn


def check_synced(roots: Iterable[nn.Module], pipelines: int) -> None:
    """Raises ValueError for a module that would gather statistics while other ranks are at other
    stages; in one process with one of the `pipelines` it is an ordinary batch norm."""
    for root in roots if pipelines > 1 else ():
        for name, module in root.named_modules():
            if isinstance(module, nn.SyncBatchNorm) and module.training:
                raise ValueError(
                    f"{name or type(root).__name__} is a SyncBatchNorm, which gathers the "
                    "statistics of all processes, but these are at other stages and microbatches "
                    "meanwhile: take torch.nn.BatchNorm, whose running statistics are those of the "
                    "whole batch, of all replicas, with deferred_batch_norm=True"
                )


def wrong_norms(roots: Iterable[nn.Module], pipelines: int) -> ValueError | None:
    """What is wrong with a step that has failed on a CPU, where there is no SyncBatchNorm."""
    try:
        check_synced(roots, pipelines)
    except ValueError as error:
        return error
    return None
