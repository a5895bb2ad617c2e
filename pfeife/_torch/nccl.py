"""NCCL's process groups without torch.distributed's list of groups."""

import os
from datetime import timedelta
from typing import Any

import torch

_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A process group on CUDA devices, whose watchdog does not end the process: who waits looks
    after that. A group reads the variable when it is made, and the user's own value holds. If the
    class moves: `torch.distributed.new_group` makes one by its number in a list of groups."""
    nccl: Any = torch.distributed.ProcessGroupNCCL  # type: ignore[attr-defined,unused-ignore]
    options = nccl.Options()
    options._timeout = timeout
    if _ERRORS in os.environ:
        return nccl(store, rank, size, options)
    os.environ[_ERRORS] = "0"
    try:
        return nccl(store, rank, size, options)
    finally:
        del os.environ[_ERRORS]
