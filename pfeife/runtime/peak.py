"""How much memory a process has had at most, and what it gives back."""

import ctypes
import resource
import sys

import torch


def peak_bytes(device: torch.device) -> int:
    """The most so far: what torch has allocated on a CUDA device; on the CPU what was resident of
    the whole process, with torch's own libraries."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def give_back() -> None:
    """Gives the system what has been freed in this process, where malloc keeps it for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
