"""What a step reaches: its modules and their hooks, what it is given, what it returns."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from pfeife import _torch
from pfeife.frontend.arguments import Given
from pfeife.frontend.batch import Leaf, fields_of
from pfeife.frontend.watch.guards import Guard
from pfeife.frontend.watch.reachable_state import Part, Places


def numbers_in(result: Any) -> Iterator[int | float]:
    """Python's numbers among results."""
    for leaf in pytree.tree_leaves(result):
        fields = fields_of(leaf)
        if fields is not None:
            yield from numbers_in(fields)
        elif type(leaf) in (int, float):
            yield leaf


def hooks_of(roots: Iterable[nn.Module]) -> dict[int, Guard]:
    """Guards of the dicts of hooks of the modules under some roots, and of those of all modules, by
    their identity."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    modules = dict.fromkeys(module for root in roots for module in root.modules())
    own = [getattr(module, name) for module in modules for name in names]
    dicts = [*own, *_torch.hooks_of_all_modules()]
    return {id(hooks): Guard.of(Part(hooks, ())) for hooks in dicts}


def given_by(leaves: Sequence[Leaf]) -> dict[int, Given]:
    """What the caller hands over, by the identity of what the first microbatch has of it."""
    return {
        id(leaf.first): Given(leaf.name, index, leaf.dim, leaf.dim is None)
        for index, leaf in enumerate(leaves)
    }


def reached_by(step: Any) -> Iterator[nn.Module]:
    """The modules that a step reaches, through functions and objects too; nothing is looked at
    before one is asked for."""
    yield from Places(step, {}).roots.values()
