"""How CUDA is told to launch kernels: what keeps NCCL's messages waiting for one another.

A GPU takes what streams are given from a few hardware queues, each in the order of the calls. With
no more queues than streams, every stream can have its own. With fewer, what waits for a message
keeps what another stream was given behind it, in the same queue, which may be the very send that
the other rank needs first.
"""

import os

# CUDA C++ Programming Guide, environment variables: 8 unless it is set, 32 at most.
QUEUES, MOST_QUEUES = 8, 32
_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def check_launching(streams: int) -> None:
    """Raises ValueError where so many streams of a rank can wait for each other in a circle."""
    blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0")
    if blocking not in ("", "0"):
        raise ValueError(
            f"CUDA_LAUNCH_BLOCKING={blocking} keeps a rank in the launch of each receive until it "
            "has its message, so that ranks wait for one another: unset it before the processes "
            "start"
        )
    queues = _queues()
    if queues < min(streams, MOST_QUEUES):
        raise ValueError(
            f"{streams} streams of a rank share {queues} hardware queues of its GPU, so that what "
            "waits for a message keeps others waiting, and ranks one another: set "
            f"{_VARIABLE}={MOST_QUEUES} before the processes start"
        )


def _queues() -> int:
    setting = os.environ.get(_VARIABLE, "")
    return min(int(setting), MOST_QUEUES) if setting.isdecimal() and int(setting) else QUEUES
