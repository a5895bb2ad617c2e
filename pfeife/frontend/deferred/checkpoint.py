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
    in a checkpoint, "" for one that is not there, which the `tape` makes."""

    path: Path
    tape: Source
    tensors: Mapping[int, Sequence[tuple[View, str]]]
    known: Collection[str]

    @functools.cached_property
    def digest(self) -> str:
        """A text that others share which read the same names of a file of the same name."""
        named = [(name, str(view)) for pairs in self.tensors.values() for view, name in pairs]
        told = f"{self.path.name} {self.tape.digest} {sorted(pair for pair in named if pair[0])}"
        return hashlib.sha256(told.encode()).hexdigest()

    def values(self, wanted: Collection[int]) -> Storages:
        """The storages with these numbers. No memory is held but for them and one tensor."""
        made = {n for n in wanted if not all(name for _, name in self.tensors[n])}
        found = dict(self.tape.values(made))
        for number in wanted:
            if number not in found:
                views = [view for view, _ in self.tensors[number]]
                size = max(view.size for view in views)
                found[number] = torch.UntypedStorage(size, device=views[0].device)
        named = [pair for number in wanted for pair in self.tensors[number] if pair[1]]
        with torch.no_grad(), stored(self.path, self.known) as file:
            file.read({name: view.of(found[view.storage]) for view, name in named})
        return found


def shelve(
    wanted: Sequence[torch.Tensor], names: Names, path: Path, others: Collection[str] = ()
) -> None:
    """From now on the values of deferred tensors are read from a checkpoint, by any of their names;
    buffers that are not there are made, and so are tensors that have no names. The checkpoint may
    have `others`, which nobody reads here. Raises ValueError for names that only one of the two
    has, and for other shapes, before anything is changed."""
    wanted = sharing(wanted)
    known = {name for several in names.values() for name in several}
    with stored(path, known) as file:
        there = {id(one): _name(one, names, file) for one in wanted}
        shapes = {
            there[id(one)] or names[id(one)][0]: view_of(one).shape
            for one in wanted
            if there[id(one)] or (isinstance(one, nn.Parameter) and id(one) in names)
        }
        check_shapes(shapes, file.shapes, path, {*known, *others})
    tensors: dict[Recipe, list[tuple[View, str]]] = {}
    for one in wanted:
        tensors.setdefault(record_of(one), []).append((view_of(one), there[id(one)]))
    for source in {id(recipe.source): recipe.source for recipe in tensors}.values():
        theirs = [recipe for recipe in tensors if recipe.source is source]
        shelf = LazyCheckpoint(
            path, source, {recipe.storage: tensors[recipe] for recipe in theirs}, known
        )
        for recipe in theirs:
            recipe.source = shelf


def _name(one: Any, names: Names, file: Stored) -> str:
    return next((name for name in names.get(id(one), ()) if name in file.shapes), "")
