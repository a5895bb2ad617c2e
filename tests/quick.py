"""What a test process leaves out, since it shows nothing.

torch measures for its log how long the guards of every compiled frame take, after it has flushed
the processor's caches (19 ms), and then collects garbage, which Python does anyway. What Python
compiles of our files is kept for the processes that tests start.
"""

import gc
import os

import torch
import torch._dynamo.guards


def leave_out() -> None:
    """Does so here and in the processes that this one starts. If torch names the measurement
    otherwise, it is made."""
    torch.set_num_threads(1)
    torch._dynamo.config.run_gc_after_compile = False
    if hasattr(torch._dynamo.guards, "profile_guard_manager"):
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    gc.set_threshold(20_000)  # what is traced lives long: it is gone through less often
    os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
