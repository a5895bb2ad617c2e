"""What benchmarks/gpu.py needs, and what it finds."""

import importlib.util
import re
import subprocess
import sys
from typing import Any

OLDEST = (2, 11)
NEEDED = ("torch", "attrs", "networkx", "scipy")


def missing(device: str) -> str | None:
    """Why nothing can be tried on a device, in one sentence, None if it can."""
    absent = [name for name in NEEDED if importlib.util.find_spec(_module(name)) is None]
    if absent:
        names = " ".join(absent)
        return (
            f"python {sys.version.split()[0]} lacks {', '.join(absent)}: pip install {names}, or, "
            f"without a network, `pip download --no-deps -d wheels {names}` for that Python "
            "elsewhere and there `pip install --no-index --no-deps --target site wheels/*.whl` "
            "with PYTHONPATH=site"
        )
    import torch

    number = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if number < OLDEST:
        return f"torch {torch.__version__} is older than {'.'.join(map(str, OLDEST))}"
    if device == "cuda" and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without"
        return (
            f"there is no CUDA GPU that torch {torch.__version__} ({built}) can use; "
            "`--device cpu` tries the rows themselves, with small sizes, Gloo in NCCL's place"
        )
    return None


def _module(name: str) -> str:
    return {"attrs": "attr"}.get(name, name)


def devices(kind: str) -> tuple[str, ...]:
    """The names of the devices that there are, of CPUs two that are one."""
    if kind == "cpu":
        return ("cpu",)
    import torch

    return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))


def versions() -> dict[str, Any]:
    """Of Python, torch and what it was built with, without starting CUDA."""
    import torch

    found: dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__}
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
        nccl = getattr(torch.cuda, "nccl", None)
        if nccl is not None and torch.distributed.is_nccl_available():
            found["NCCL"] = ".".join(map(str, nccl.version()))
        found |= _driver()
    return found


def _driver() -> dict[str, str]:
    """The GPU's name and driver, by nvidia-smi."""
    asked = "name,driver_version,memory.total"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    lines = [line.split(", ") for line in said.splitlines() if line.count(", ") == 2]
    if not lines:
        return {}
    name, driver, memory = lines[0]
    return {"GPU": f"{len(lines)} x {name} ({memory})", "driver": driver}
