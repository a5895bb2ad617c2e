"""The list of what a checkpoint of torch.distributed.checkpoint has, which torch keeps as a pickle.

Read with an allow list of the classes that torch writes there, none of which runs code of the file.
Where a release writes another one, the error has its name: see that it only holds data, and add it.
What a later release of torch or Python has written is read as well: see `_Properties` and `_MOVED`.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorProperties

_HELD = "torch.distributed.checkpoint."
_KNOWN = {
    *(("pathlib", name) for name in ("PosixPath", "WindowsPath")),
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
_MOVED = {"pathlib._local": "pathlib"}  # the name in Python 3.13 alone


class _Properties(TensorProperties):
    """A tensor's properties, without those that torch has added at the end since (strides, 2.15),
    for which its older releases have no place. None of them is needed to read it."""

    def __setstate__(self, state: Any) -> None:
        try:
            super().__setstate__(state)
        except ValueError:
            super().__setstate__(state[:_FIRST])


_FIRST = 5  # properties, which all releases have


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = _MOVED.get(module, module)
        if (module, name) == (TensorProperties.__module__, TensorProperties.__name__):
            return _Properties
        of_torch = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not of_torch and (module, name) not in _KNOWN:
            raise ValueError(f"it has {module}.{name}, which torch does not write there")
        return super().find_class(module, name)


def listed(path: Path) -> Any:
    """torch's `Metadata`, as it stands in a checkpoint's list. Raises ValueError for a file that is
    none, before anything of it could run; FileNotFoundError."""
    with path.open("rb") as file:
        try:
            metadata = _Reader(file).load()
        except Exception as error:  # a damaged pickle may raise any
            raise ValueError(f"{path} is no list of a checkpoint: {error}") from None
    if type(metadata).__name__ != "Metadata":
        raise ValueError(f"{path} is no list of a checkpoint: it has a {type(metadata).__name__}")
    return metadata


def together(
    parts: Mapping[str, Any], whole: Mapping[str, str], paths: Mapping[str, tuple]
) -> dict[str, Any]:
    """What torch takes apart when it saves, put together again: `parts` has the values, `whole` the
    key under which a part belongs, `paths` what `Metadata.planner_data` has."""
    state: dict[str, Any] = {}
    for part, value in parts.items():
        path, key = paths.get(part, tuple(part.split("."))), whole[part]
        # A key may have dots itself, so it is looked for as the beginning of the path. Of a part
        # that is a key by itself, nothing is left of the path.
        starts = (at for at in range(len(path)) if ".".join(map(str, path[:at])) == key)
        set_element(state, (key, *path[next(starts, len(path)) :]), value)
    return state
