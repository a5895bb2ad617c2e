"""Values for models that were made without, from a file: each tensor is read by itself."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

from pfeife.frontend.waiting import forsake, is_waiting, make

Names = Mapping[int, Sequence[str]]


@attrs.frozen
class Stored:
    """A file of tensors: their names, what tells the shape of one of them, and what reads it."""

    path: Path
    names: Collection[str]
    shape: Callable[[str], Sequence[int]]
    read: Callable[[str], torch.Tensor]


@contextmanager
def stored(path: str | os.PathLike[str]) -> Iterator[Stored]:
    """A file of safetensors, by its ending, or one that `torch.save` has written of a state_dict.
    Raises ValueError for a file of something else."""
    path = Path(path)
    if path.suffix == ".safetensors":
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ValueError(f"{path} needs the package safetensors: pip install it") from error
        with safe_open(str(path), framework="pt") as file:
            yield Stored(
                path,
                set(file.keys()),
                lambda name: file.get_slice(name).get_shape(),
                file.get_tensor,
            )
        return
    found = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    if not isinstance(found, dict) or not all(isinstance(v, torch.Tensor) for v in found.values()):
        raise ValueError(
            f"{path} is no state_dict: it has something else than tensors by their names"
        )
    yield Stored(path, found.keys(), lambda name: found[name].shape, found.__getitem__)


def fill(wanted: Sequence[Any], names: Names, file: Stored) -> None:
    """Gives deferred tensors their values from a file, by any of their names; buffers that are not
    there are made, and so are tensors that have no names. Raises ValueError for names that only one
    of the two has, and for other shapes, before anything is changed."""
    _check_names(wanted, names, file)
    there = {id(one): name for one in wanted for name in [_name(one, names, file)] if name}
    given = [one for one in wanted if id(one) in there]
    for one in given:
        shape = list(file.shape(there[id(one)]))
        if shape != list(one.shape):
            raise ValueError(
                f"{there[id(one)]} is {shape} in {file.path} and {list(one.shape)} in the model"
            )
    # What shares memory with others is made with them, and then written to.
    made = {one.recipe.place for one in wanted if id(one) not in there}
    make([one for one in wanted if one.recipe.place in made])
    forsake([one for one in given if is_waiting(one)])
    with torch.no_grad():
        for one in given:
            one.data.copy_(file.read(there[id(one)]))


def _check_names(wanted: Sequence[Any], names: Names, file: Stored) -> None:
    unknown = sorted(set(file.names) - {name for several in names.values() for name in several})
    missing = [
        names[id(one)][0]
        for one in wanted
        if isinstance(one, torch.nn.Parameter) and not _name(one, names, file)
    ]
    for found, where in ((unknown, "the model"), (missing, str(file.path))):
        if found:
            raise ValueError(f"{where} has no {found[:3]} ({len(found)} in all)")


def _name(one: Any, names: Names, file: Stored) -> str:
    return next((name for name in names.get(id(one), ()) if name in file.names), "")
