"""Whether somebody profiles."""

from torch.autograd import profiler


def is_profiled() -> bool:
    """Whether a profiler of torch's runs, in any thread of this process.

    `torch.autograd._profiler_enabled` tells that of this thread alone, and not of a profiler of
    all threads. Without this module's flag every action would always be recorded, at a microsecond
    each.
    """
    return bool(profiler._is_profiler_enabled)
