"""The list of what a checkpoint of torch.distributed.checkpoint has, which torch keeps as a pickle.

Read with an allow list of the classes that torch writes there, none of which runs code of the file.
Where a release writes another one, the error has its name: see that it only holds data, and add it.
"""

import pickle
from pathlib import Path
from typing import Any

import torch

_HELD = "torch.distributed.checkpoint."
_KNOWN = {
    *(("pathlib", name) for name in ("PosixPath", "WindowsPath")),
    *(("pathlib._local", name) for name in ("PosixPath", "WindowsPath")),  # Python 3.13
    *(("torch", "Size"), ("torch.serialization", "_get_layout")),
    (f"{_HELD}filesystem", "_StorageInfo"),
    *(
        (f"{_HELD}metadata", name)
        for name in (
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
            *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ),
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        of_torch = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not of_torch and (module, name) not in _KNOWN:
            raise ValueError(f"it has {module}.{name}, which torch does not write there")
        return super().find_class(module, name)


def listed(path: Path) -> Any:
    """torch's `Metadata`, as it stands in a checkpoint's list. Raises ValueError for a file that is
    none, before anything of it could run; FileNotFoundError."""
    with path.open("rb") as file:
        try:
            found = _Reader(file).load()
        except Exception as error:  # a damaged pickle may raise any
            raise ValueError(f"{path} is no list of a checkpoint: {error}") from None
    if type(found).__name__ != "Metadata":
        raise ValueError(f"{path} is no list of a checkpoint: it has a {type(found).__name__}")
    return found
