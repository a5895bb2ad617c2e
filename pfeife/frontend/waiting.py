"""Tensors without values yet: a shape, dtype, device and strides, one NaN, and a recipe.

The recipe is the tape of the constructor that has made the tensor (or a checkpoint), and where it
lies. Optimizers
may have such tensors; whoever asks for their values is told what to do.
"""

import contextlib
import functools
import gc
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from pfeife import _torch
from pfeife.frontend.places import Places
from pfeife.frontend.tape import Source, View

_ENDS = (type, types.ModuleType, types.FrameType, types.CodeType)
_LAYOUT = {"stride", "is_contiguous", "storage_offset", "get_device", "device", "is_cuda", "is_cpu"}
_VALUES = {
    *("storage", "untyped_storage", "_typed_storage", "data_ptr", "set_", "share_memory_"),
    *("tolist", "numpy", "__array__", "__dlpack__"),
}


@attrs.frozen(eq=False)
class Recipe:
    """How the values of a tensor are made, and of which class it is then."""

    tape: Source
    view: View
    kind: type
    line: str

    @property
    def place(self) -> tuple[int, int]:
        """What tensors share that share memory."""
        return id(self.tape), self.view.storage


class Deferred:
    """What a tensor is as well whose values have not been made yet."""

    recipe: Recipe

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            name = func.__self__.__name__
            if name == "data" and len(args) > 1 and args[1] is args[0]:  # model.to(...) of the same
                return None
        if name in _LAYOUT:
            args = tuple(_bare(o) if isinstance(o, Deferred) else o for o in args)
        elif name in _VALUES or (name == "data" and len(args) > 1):
            raise _refusal((args, kwargs), name)
        with _torch.plainly(), _Refusing(name, (args, kwargs)):
            return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:
        view = self.recipe.view
        return f"Deferred({list(view.shape)}, {view.dtype}, made in {self.recipe.line})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal(self, "pickling")

    def __deepcopy__(self, memo: dict) -> Any:
        raise _refusal(self, "copying")


class _Refusing(_torch.TorchDispatchMode):
    """While something asks a deferred tensor for what needs no values, or else is refused."""

    def __init__(self, name: str, given: Any):
        super().__init__()
        self.name, self.given = name, given

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        raise _refusal(self.given, self.name)


def _refusal(given: Any, name: str) -> ValueError:
    first = next((o.recipe for o in pytree.tree_leaves(given) if isinstance(o, Deferred)), None)
    shape, line = (list(first.view.shape), first.line) if first else ("", "")
    return ValueError(
        f"{name} asks for the values of a tensor {shape} of a model that was made in "
        f"pfeife.deferred_init() and has none yet ({line}): call pfeife.materialize(model) before, "
        "or a step of pfeife.compile, which does so; what initialises the model goes inside of "
        "deferred_init()"
    )


def make(wanted: Iterable[Any], known: Iterable[Any] = ()) -> None:
    """Makes the values of deferred tensors, and of those among the `known` ones that share memory
    with them."""
    wanted = list(wanted)
    tensors = {id(one): one for one in (*wanted, *known)}
    for one in tensors.values():
        _check_leaf(one)
    recipes = [one.recipe for one in wanted]
    for tape in {id(one.tape): one.tape for one in recipes}.values():
        values = tape.values({one.view.storage for one in recipes if one.tape is tape})
        for key, one in list(tensors.items()):
            if one.recipe.tape is tape and one.recipe.view.storage in values:
                view = _released(tensors.pop(key)).view
                with _torch.plainly():
                    one.data = view.of(values[view.storage])


def _check_leaf(one: Any) -> None:
    if one.grad_fn is not None:
        raise ValueError(
            f"a tensor {list(one.shape)} was computed from parameters with gradients when the "
            f"model was made ({one.recipe.line}), and its graph cannot be made later: compute it "
            "in the forward (as torch.nn.utils.parametrizations does), or under torch.no_grad()"
        )


def deferred_tensors(step: Any, arguments: Mapping[str, Any] | None = None) -> list[Any]:
    """The deferred tensors that a module has, or a step reaches, by itself or in `arguments`, also
    inside of objects of torch's such as distributions."""
    if not Deferred.__subclasses__():  # nobody has ever made one
        return []
    places = Places(step, arguments or {})
    return list(_inside([step, *(slot.get() for slot in places.slots)]))


def _inside(roots: Iterable[Any]) -> Iterator[Any]:
    """The deferred tensors that some objects refer to, each once; functions by what they close
    over, not by their globals."""
    waiting, seen = list(roots), dict[int, Any]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or not gc.is_tracked(one) or isinstance(one, _ENDS):
            continue
        seen[id(one)] = one  # kept, as long as its identity counts
        if issubclass(type(one), Deferred):
            yield one
        elif isinstance(one, types.FunctionType):
            waiting += [one.__closure__, one.__defaults__, one.__kwdefaults__, vars(one)]
        else:
            waiting += gc.get_referents(one)


def _laid(
    tensors: Collection[Any], storage: Callable[[torch.device, int], torch.UntypedStorage]
) -> None:
    """Makes plain tensors of deferred ones, in storages of the sizes that they need; those that
    share one go on to do so."""
    for one in tensors:
        _check_leaf(one)
    places = [one.recipe.place for one in tensors]
    sizes: dict[tuple[int, int], int] = {}
    for place, one in zip(places, tensors, strict=True):
        sizes[place] = max(sizes.get(place, 0), one.recipe.view.size)
    made: dict[tuple[int, int], torch.UntypedStorage] = {}
    for place, one in zip(places, tensors, strict=True):
        view = one.recipe.view
        if place not in made:
            made[place] = storage(view.device, sizes[place])
        one.__class__ = one.recipe.kind
        with _torch.plainly():
            one.data = view.of(made[place])


@contextlib.contextmanager
def bare(tensors: Collection[Any]) -> Iterator[None]:
    """While deferred tensors are plain ones, which nothing may read; those that are not made in
    between are deferred ones afterwards. Those without dimensions are made at once: Dynamo reads
    them."""
    make([one for one in tensors if not one.dim()], tensors)
    tensors = [one for one in tensors if is_waiting(one)]
    _laid(tensors, _nowhere())
    try:
        yield
    finally:
        for one in tensors:
            if is_waiting(one):
                become(one, one.recipe)


def _nowhere() -> Callable[[torch.device, int], torch.UntypedStorage]:
    """Makes storages that take no memory, each at an address of its own."""
    address = _torch.FIRST

    def storage(device: torch.device, size: int) -> torch.UntypedStorage:
        nonlocal address
        found = _torch.hollow(address, device, size)
        address += (size // 64 + 1) * 64
        return found

    return storage


def is_waiting(one: Any) -> bool:
    """Whether a tensor has a recipe, and no values yet."""
    return "recipe" in vars(one) and isinstance(one.recipe, Recipe)


def check_values(tensors: Iterable[Any], why: str) -> None:
    """Raises ValueError if there are tensors whose values may not be read."""
    if any(isinstance(one, torch.Tensor) and _torch.is_hollow(one) for one in tensors):
        raise ValueError(
            f"{why}, which needs the values of a model that was made in pfeife.deferred_init(): "
            "call pfeife.materialize(model) first"
        )


def standing_for(one: Any) -> torch.Tensor:
    """A tensor by whose values others can be compared: what says how a deferred one is made, others
    themselves."""
    if not is_waiting(one):
        found: torch.Tensor = one
        return found
    text = f"{one.recipe.tape.digest} {one.recipe.view}"
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def forsake(tensors: Collection[Any]) -> None:
    """Makes plain tensors of deferred ones, which have no memory: nothing may look at them before
    they are absent (`absent.become_absent`)."""
    _laid(tensors, _nowhere())
    for one in tensors:
        _released(one)


def become(one: Any, recipe: Recipe) -> None:
    """Makes a tensor a deferred one, with a NaN in place of its values."""
    view = recipe.view
    unknown: Any = float("nan") if view.dtype.is_floating_point or view.dtype.is_complex else 0
    with _torch.plainly():
        value = torch.full((), unknown, dtype=view.dtype, device=view.device)
        one.data = value.expand(view.shape)
    one.recipe = recipe
    one.__class__ = _deferred_class(recipe.kind)


def _released(one: Any) -> Recipe:
    """The recipe of a tensor, which has the class again that it was made with."""
    recipe: Recipe = one.recipe
    one.__class__ = recipe.kind
    del one.recipe
    return recipe


@functools.cache
def _deferred_class(kind: type) -> type:
    return type(f"Deferred{kind.__name__}", (Deferred, kind), {})


def _bare(one: Any) -> torch.Tensor:
    """A tensor with the layout of a deferred one, to be asked for it."""
    view = one.recipe.view
    with _torch.plainly():
        return view.of(_torch.hollow(_torch.FIRST, view.device, view.size))
