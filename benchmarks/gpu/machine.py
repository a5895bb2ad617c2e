"""What the machine is, as torch sees it."""

from typing import Any

import torch

from gpu.rows import Row, Setting
from pfeife.cost import default_machine


def about(setting: Setting) -> dict[str, Any]:
    """The device, and what profile plans are made for."""
    device = torch.device(setting.device)
    profile = default_machine(device)
    found: dict[str, Any] = {"profile": profile.name, "devices": len(setting.devices)}
    if setting.cuda:
        given = torch.cuda.get_device_properties(device)
        found |= {
            "name": given.name,
            "capability": f"{given.major}.{given.minor}",
            "processors": given.multi_processor_count,
            "GiB": given.total_memory / 2**30,
            "cuDNN": torch.backends.cudnn.version(),
        }
    return found


def product(setting: Setting) -> dict[str, Any]:
    """A large product of matrices: whether the device is as fast as its profile says."""
    size = 256 if setting.small else 8192
    dtype = torch.float32 if setting.small else torch.bfloat16
    one = torch.randn(size, size, device=setting.device, dtype=dtype)
    from gpu.clock import seconds_of

    taken = seconds_of(lambda: one @ one, setting, 10)
    return {"TFLOP/s": 2e-12 * size**3 / taken, "size": size, "dtype": str(dtype)}


ROWS = [Row("device", about), Row("a product of matrices", product)]
