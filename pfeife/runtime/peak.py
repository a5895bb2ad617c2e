"""How much memory a process has had at most."""

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
