"""torchvision and torchaudio beside a torch for CPUs, where their wheels are those for CUDA.

Their shared libraries do not load there, and they do without. torchvision needs the schemas of the
two operators for which it registers a fake kernel at once; torchaudio looks for its libraries and
raises an error for those that it finds and cannot load, so that it is told at first that it has
none. Nothing is changed where the libraries load.
"""

import importlib.util
import sys
import types
from pathlib import Path

import torch

NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def prepare() -> None:
    """To be called before anything imports torchvision or torchaudio."""
    if "torchvision" not in sys.modules and not _loads("torchvision", "_C*.so"):
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", NMS)
    if "torchaudio" not in sys.modules and not _loads("torchaudio", "lib/_torchaudio.abi3.so"):
        extension = types.ModuleType("torchaudio._extension")
        extension._IS_TORCHAUDIO_EXT_AVAILABLE = False  # type: ignore[attr-defined]
        extension.fail_if_no_align = lambda function: function  # type: ignore[attr-defined]
        sys.modules.setdefault(extension.__name__, extension)


def _loads(package: str, pattern: str) -> bool:
    """Whether a package's libraries can be loaded; True where there is none of either."""
    spec = importlib.util.find_spec(package)
    folder = Path(spec.origin).parent if spec and spec.origin else None
    libraries = sorted(folder.glob(pattern)) if folder else []
    if not libraries:
        return package != "torchvision" or folder is None
    try:
        for library in libraries:
            torch.ops.load_library(library)
    except OSError:
        return False
    return True
