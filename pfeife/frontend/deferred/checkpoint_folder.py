"""A folder that torch.distributed.checkpoint has written, read key by key in this process alone."""

import io
import itertools
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pfeife import _torch

METADATA = ".metadata"  # what is written last


class Folder:
    """What such a folder has: `tensors`, empty ones on the meta device by their keys, and the keys
    of `objects`.

    Raises ValueError for a folder without a list of keys, as an interrupted save leaves it, or with
    one that is more than that: torch keeps it as a pickle, of which nothing is run.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path, self.reader = Path(path), FileSystemReader(path)
        try:
            self.metadata = _torch.listed(self.path / METADATA)
        except FileNotFoundError:
            raise ValueError(
                f"{path} is no complete checkpoint: it has no {METADATA}, which is written last"
            ) from None
        self.tensors: dict[str, torch.Tensor] = {}
        self.objects: set[str] = set()
        for key, entry in self.metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                dtype = entry.properties.dtype
                self.tensors[key] = torch.empty(entry.size, dtype=dtype, device="meta")
            else:
                self.objects.add(key)
        self.places = {key: at for at, key in enumerate(self.metadata.state_dict_metadata)}
        self.keys = sorted(self.places)

    def under(self, prefix: str) -> list[str]:
        """The keys that begin so, in the order in which they were written."""
        # Large checkpoints have many keys, and `whole` looks for each prefix anew.
        start = bisect_left(self.keys, prefix)
        keys = itertools.islice(self.keys, start, None)
        matches = itertools.takewhile(lambda key: key.startswith(prefix), keys)
        return sorted(matches, key=self.places.__getitem__)

    def fill(self, into: Mapping[str, torch.Tensor]) -> None:
        """Reads tensors by their keys into others of the same shapes."""
        self._read(dict(into))

    def read(self, keys: Iterable[str]) -> dict[str, Any]:
        """Tensors on the CPU and objects by their keys. Raises pickle.UnpicklingError for objects
        that are not plain data."""
        state: dict[str, Any] = {
            key: torch.empty_like(self.tensors[key], device="cpu") if key in self.tensors else None
            for key in keys
        }
        return self._read(state)

    def whole(self, keys: Iterable[str]) -> dict[str, Any]:
        """As `read`, and what torch has taken apart: dicts, by strings, and lists with tensors."""
        parts = {
            part: key
            for key in keys
            for part in ([key] if key in self.places else self.under(f"{key}."))
        }
        return _torch.together(self.read(parts), parts, self.metadata.planner_data or {})

    def _read(self, state: dict[str, Any]) -> dict[str, Any]:
        # What torch.distributed.checkpoint.load does, but without a process group.
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, self.metadata, True)
        self.reader.set_up_storage_reader(self.metadata, True)
        plans = [self.reader.prepare_local_plan(planner.create_local_plan())]
        (plan,) = self.reader.prepare_global_plan(planner.create_global_plan(plans))
        self.reader.read_data(planner.finish_plan(plan), planner).wait()
        return state


class _Planner(DefaultLoadPlanner):
    """torch's own, which makes nothing but plain data of what it reads."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
