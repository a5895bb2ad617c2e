"""Parameters and buffers that have not been made yet: absent tensors whose record is a recipe.

    weight   nn.Parameter [4, 4], float32     no memory, as any absent tensor
      its storage's record: Recipe            storage 0 of a tape, or of a checkpoint

All that share memory have one recipe, and get their values together. Optimizers may have such
tensors; whoever asks for their values is told what to do.
"""

import gc
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

import attrs
import torch

from pfeife import _torch
from pfeife._torch import is_absent, record_of
from pfeife.frontend.deferred.init_replay import Source, View
from pfeife.frontend.deferred.remote_batch import LayoutAlone
from pfeife.frontend.watch.gc_objects import living
from pfeife.frontend.watch.reachable_state import Places

_ENDS = (type, types.ModuleType, types.FrameType, types.CodeType)


@attrs.define(eq=False)
class Recipe(LayoutAlone):
    """Why some tensors have no values yet: they lie in one storage of a `source`, which makes it;
    None while their constructor runs. `shape` is that of one of them, `line` where it was made."""

    source: Source | None
    storage: int
    shape: tuple[int, ...]
    line: str

    def __attrs_post_init__(self) -> None:
        _RECIPES.add(self)

    def refusal(self, what: str) -> ValueError:
        """Says how and where values are made."""
        return ValueError(
            f"{what} asks for the values of a tensor {list(self.shape)} of a model that was made "
            f"in pfeife.deferred_init() and has none yet ({self.line}): call "
            "pfeife.materialize(model) before, or a step of pfeife.compile, which does so; what "
            "initialises the model goes inside of deferred_init()"
        )


# All that there are. Where there is none, no tensor waits for its values, which every capture asks:
# going through all objects of a process would take longer than to capture a small step.
_RECIPES: weakref.WeakSet[Recipe] = weakref.WeakSet()


def is_waiting(value: Any) -> bool:
    """Whether something is a tensor that has a recipe, and no values yet."""
    return _is_deferred(value) and record_of(value).source is not None


def is_recorded(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether something is a tensor of a constructor that still runs."""
    return _is_deferred(value) and record_of(value).source is None


def _is_deferred(value: Any) -> bool:
    return is_absent(value) and isinstance(record_of(value), Recipe)


def view_of(tensor: torch.Tensor) -> View:
    """Where a deferred tensor lies in the storage of its recipe."""
    with _torch.plainly():
        return View.at(record_of(tensor).storage, tensor)


def sharing(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Some deferred tensors, and those that share memory with them, wherever they are. What was
    computed from parameters with gradients is left out, unless it is one of these."""
    # Nobody lists who shares a storage, so all tensors are asked.
    users = {id(tensor): tensor for tensor in tensors}
    recipes = {record_of(tensor) for tensor in users.values()}
    for tensor in living(torch.Tensor) if recipes else ():
        if is_waiting(tensor) and record_of(tensor) in recipes and tensor.grad_fn is None:
            users.setdefault(id(tensor), tensor)
    return list(users.values())


def make(tensors: Iterable[torch.Tensor]) -> None:
    """Makes the values of deferred tensors, and of all that share memory with them."""
    users = [(tensor, record_of(tensor)) for tensor in sharing(tensors)]
    # All are checked before the first is made: an error leaves them as they were.
    for tensor, _ in users:
        _check_leaf(tensor)
    for source in {id(recipe.source): recipe.source for _, recipe in users}.values():
        deferred = [tensor for tensor, recipe in users if recipe.source is source]
        views = [view_of(tensor) for tensor in deferred]
        values = source.values({view.storage for view in views})
        for tensor, view in zip(deferred, views, strict=True):
            # The same objects get values: optimizers and modules have them already.
            with _torch.plainly():
                tensor.data = view.of(values[view.storage])


def prepare(tensors: Iterable[torch.Tensor]) -> None:
    """Before a capture of deferred tensors: makes those without dimensions, which Dynamo reads.
    Raises ValueError for what can never be made."""
    tensors = list(tensors)
    for tensor in tensors:
        _check_leaf(tensor)
    make(tensor for tensor in tensors if not view_of(tensor).shape)


def _check_leaf(tensor: torch.Tensor) -> None:
    if tensor.grad_fn is not None:
        raise ValueError(
            f"a tensor {list(tensor.shape)} was computed from parameters with gradients when the "
            f"model was made ({record_of(tensor).line}), and its graph cannot be made later: "
            "compute it in the forward (as torch.nn.utils.parametrizations does), or under "
            "torch.no_grad()"
        )


def deferred_tensors(step: Any, arguments: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
    """The deferred tensors that a module has, or a step reaches, by itself or in `arguments`, also
    inside of objects of torch's such as distributions."""
    if not _RECIPES:
        return []
    places = Places(step, arguments or {})
    return list(_inside([step, *(slot.get() for slot in places.slots)]))


def _inside(roots: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The deferred tensors that some objects refer to, each once; functions by what they close
    over, not by their globals."""
    left, seen = list(roots), dict[int, Any]()
    while left:
        value = left.pop()
        if id(value) in seen or not gc.is_tracked(value) or isinstance(value, _ENDS):
            continue
        seen[id(value)] = value  # kept, as long as its identity counts
        if is_waiting(value):
            yield value
        elif isinstance(value, types.FunctionType):
            left += [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
        else:
            left += gc.get_referents(value)


def check_values(tensors: Iterable[Any], why: str) -> None:
    """Raises ValueError if there are tensors whose values may not be read."""
    for tensor in tensors:
        if is_waiting(tensor):
            raise record_of(tensor).refusal(f"{why}, which")


def standing_for(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor by whose values others can be compared: what says how a deferred one is made, others
    themselves."""
    if not is_waiting(tensor):
        return tensor
    text = f"{record_of(tensor).source.digest} {view_of(tensor)}"
    return torch.tensor(list(text.encode()), dtype=torch.uint8)
