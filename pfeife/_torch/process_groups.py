"""Process groups: Gloo's over a device of ours, NCCL's outside of torch.distributed's list."""

import os
from datetime import timedelta
from typing import Any

import torch


def gloo_device() -> Any:
    """A thread that looks after connections, which several groups can share: every one wakes up a
    hundred times a second. It listens where torch's own groups do. If `create_device` moves: leave
    the device out, and each group has its own."""
    gloo = torch.distributed.ProcessGroupGloo
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta, device: Any) -> Any:
    """A process group over a device. If its options move: their public form is the timeout."""
    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout, options._devices = timeout, [device]
    return gloo(store, rank, size, options)


def gather_into(group: Any, output: torch.Tensor, part: torch.Tensor) -> Any:
    """Begins to gather every rank's `part` into `output`, each at its place. If it moves:
    `allgather` takes a list of its parts, and more memory."""
    return group._allgather_base(output, part)


def sequence_of(group: Any) -> int:
    """How many collectives a process group has begun here, which all its ranks begin in one order;
    Gloo's counts messages between two ranks as well. If it moves: 0, and ranks that wait in a
    collective of their script count as if they were somewhere before it."""
    return int(group._get_sequence_number_for_group())


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
    # By itself: what puts a whole environment back empties it first, and other threads read it.
    os.environ[_ERRORS] = "0"
    try:
        return nccl(store, rank, size, options)
    finally:
        del os.environ[_ERRORS]
