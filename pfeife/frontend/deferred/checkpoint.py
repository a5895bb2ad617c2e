"""Values from a checkpoint for models that were made without."""

import functools
import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from pfeife._torch import record_of
from pfeife.frontend.deferred.checkpoint_files import Stored, check_shapes, stored
from pfeife.frontend.deferred.init_replay import Source, Storages, View
from pfeife.frontend.deferred.tensors import Recipe, sharing, view_of

Names = Mapping[int, Sequence[str]]


@attrs.frozen(eq=False)
class LazyCheckpoint:
    """What the values of some storages are made of from now on: for each of their tensors its name
    in a checkpoint, "" for one that is not there, which the `tape` makes. `model_names` are all
    names of the model, by which a folder tells where the model lies in it."""

    path: Path
    tape: Source
    tensors: Mapping[int, Sequence[tuple[View, str]]]
    model_names: Collection[str]

    @functools.cached_property
    def digest(self) -> str:
        """A text that others share which read the same names of a file of the same name."""
        named = [(name, str(view)) for pairs in self.tensors.values() for view, name in pairs]
        text = f"{self.path.name} {self.tape.digest} {sorted(pair for pair in named if pair[0])}"
        return hashlib.sha256(text.encode()).hexdigest()

    def values(self, wanted: Collection[int]) -> Storages:
        """The storages with these numbers. No memory is held but for them and one tensor."""
        # Where the checkpoint lacks a tensor of a storage, the tape makes all of that storage, and
        # the tensors that the checkpoint has are read over it.
        made = {n for n in wanted if not all(name for _, name in self.tensors[n])}
        storages = dict(self.tape.values(made))
        for number in wanted:
            if number not in storages:
                views = [view for view, _ in self.tensors[number]]
                size = max(view.size for view in views)
                storages[number] = torch.UntypedStorage(size, device=views[0].device)
        named = [pair for number in wanted for pair in self.tensors[number] if pair[1]]
        with torch.no_grad(), stored(self.path, self.model_names) as file:
            file.read({name: view.of(storages[view.storage]) for view, name in named})
        return storages


def shelve(
    wanted: Sequence[torch.Tensor], names: Names, path: Path, others: Collection[str] = ()
) -> None:
    """From now on the values of deferred tensors are read from a checkpoint, by any of their names;
    buffers that are not there are made, and so are tensors that have no names. The checkpoint may
    have `others`, which nobody reads here. Raises ValueError for names that only one of the two
    has, and for other shapes, before anything is changed."""
    wanted = sharing(wanted)
    model_names = {name for aliases in names.values() for name in aliases}
    with stored(path, model_names) as file:
        name_in_file = {id(tensor): _name(tensor, names, file) for tensor in wanted}
        # A parameter that the file has not is here by its own name, so that it is found missing; a
        # buffer may be missing.
        shapes = {
            name_in_file[id(tensor)] or names[id(tensor)][0]: view_of(tensor).shape
            for tensor in wanted
            if name_in_file[id(tensor)]
            or (isinstance(tensor, nn.Parameter) and id(tensor) in names)
        }
        check_shapes(shapes, file.shapes, path, {*model_names, *others})
    tensors: dict[Recipe, list[tuple[View, str]]] = {}
    for tensor in wanted:
        tensors.setdefault(record_of(tensor), []).append(
            (view_of(tensor), name_in_file[id(tensor)])
        )
    # Nothing has changed so far: all errors come before this.
    # One for each source: tensors of several `deferred_init()` have several tapes.
    sources: dict[int, Any] = {id(recipe.source): recipe.source for recipe in tensors}
    for source in sources.values():
        recipes = [recipe for recipe in tensors if recipe.source is source]
        shelf = LazyCheckpoint(
            path, source, {recipe.storage: tensors[recipe] for recipe in recipes}, model_names
        )
        for recipe in recipes:
            recipe.source = shelf


def _name(tensor: Any, names: Names, file: Stored) -> str:
    return next((name for name in names.get(id(tensor), ()) if name in file.shapes), "")
