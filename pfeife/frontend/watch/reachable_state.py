"""What a step reaches by itself: the tensors that it may read, and the values that steer it.

A step is a function with closures and globals, a method, or a module. From there on everything that
lies in modules, lists, dicts, cells and plain objects is a `Slot` of its container:

    def step(x): return net(x) * scale        cell `net` -> Module -> _modules["0"] -> ...
                                              cell `scale` -> a tensor
"""

import collections
import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import nn

from pfeife.frontend.watch.executed import LIBRARIES, STANDARD, global_names

# What has entries; any other object has those that its class has slots for.
Container = dict[Any, Any] | list[Any] | tuple[Any, ...] | types.CellType | Any
Entries = tuple[Sequence[Any], Sequence[Any]]  # keys and values
SIMPLE = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
_MOST = 10_000  # entries of a list or dict that may have tensors of the step's
_ROWS = (list, tuple, collections.deque)
_UNSAID = ("", "_parameters", "_buffers", "_modules", "__self__", "__func__")


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()  # what a slot has that is not there any more


@attrs.frozen
class Slot:
    """An entry of a container, and the words by which a person would call it."""

    container: Container = attrs.field(eq=id)
    key: Any
    words: tuple[str, ...] = attrs.field(eq=False)

    @property
    def name(self) -> str:
        """Its words with dots between them, "step" for the step itself."""
        return ".".join(self.words) or "step"

    @property
    def is_open(self) -> bool:
        """Whether something else can be put there for a while, whatever it belongs to."""
        return isinstance(self.container, dict | list | types.CellType)

    def get(self) -> Any:
        """What is there now, NOTHING if there is no such entry any more."""
        try:
            if isinstance(self.container, types.CellType):
                return self.container.cell_contents
            if isinstance(self.container, dict):  # perhaps of a class that makes what it gives
                return dict.__getitem__(self.container, self.key)
            if isinstance(self.container, list | tuple | types.MappingProxyType):
                return self.container[self.key]
            return getattr(self.container, self.key)
        except (LookupError, ValueError, AttributeError):
            return NOTHING

    def put(self, value: Any) -> None:
        """Puts a value there; NOTHING takes the entry out, and empties a cell."""
        if isinstance(self.container, types.CellType):
            if value is NOTHING:
                del self.container.cell_contents
            else:
                self.container.cell_contents = value
        elif not isinstance(self.container, dict | list):
            if value is NOTHING:
                delattr(self.container, self.key)
            else:
                setattr(self.container, self.key, value)
        elif value is NOTHING:
            del self.container[self.key]
        else:
            self.container[self.key] = value


@attrs.frozen(eq=False)
class Part:
    """The entries of a container: all of a dict, list or tuple, or those that have some `names`."""

    container: Container
    words: tuple[str, ...]
    names: frozenset[str] | None = None

    def look(self) -> Entries:
        """The entries now."""
        container, names = self.container, self.names
        if isinstance(container, dict) and names is None:  # perhaps of a class with its own ways
            return list(dict.keys(container)), list(dict.values(container))
        if isinstance(container, list | tuple | collections.deque):
            # The methods of list or tuple itself, as a class of the user's may have its own.
            kind: Any = next(base for base in type(container).__mro__ if base in _ROWS)
            return range(kind.__len__(container)), list(kind.__iter__(container))
        assert names is not None
        if isinstance(container, dict | types.MappingProxyType):
            keys = [key for key in container if key in names]
            return keys, [container[key] for key in keys]
        pairs = [(key, Slot(container, key, ()).get()) for key in sorted(names)]
        there = [(key, value) for key, value in pairs if value is not NOTHING]
        return [key for key, _ in there], [value for _, value in there]

    def slot(self, key: Any) -> Slot:
        """The slot of one of its keys."""
        unsaid = key in _UNSAID or not isinstance(key, str | int)
        return Slot(self.container, key, self.words if unsaid else (*self.words, str(key)))

    def slots(self) -> Iterator[tuple[Slot, Any]]:
        """The slots with what is in them now."""
        return ((self.slot(key), value) for key, value in zip(*self.look(), strict=True))


class Places:
    """Everything that a step reaches when this is made, by itself or in arguments, which have
    names. `roots` has the outermost modules by what the step calls them."""

    def __init__(self, step: Callable[..., Any], arguments: Mapping[str, Any]):
        self.slots: list[Slot] = []
        self.parts: list[Part] = []
        self.roots: dict[str, nn.Module] = {}
        self._known: dict[int, Any] = {}
        self._walk(step, (), None)
        for name, value in arguments.items():
            self._walk(value, (name,), None)

    def now(self) -> dict[Slot, Any]:
        """What is in every slot, and in new ones of the same containers."""
        return {slot: value for part in self.parts for slot, value in part.slots()}

    def lists(self) -> list[list[Any]]:
        """All lists that the step reaches."""
        return [part.container for part in self.parts if isinstance(part.container, list)]

    def _walk(self, value: Any, words: tuple[str, ...], root: nn.Module | None) -> None:
        if (
            isinstance(value, (torch.Tensor, type, types.ModuleType, *SIMPLE))
            or id(value) in self._known
        ):
            return
        self._known[id(value)] = value  # kept alive, as long as its identity counts
        if _is_foreign(value):
            return
        if isinstance(value, nn.Module) and root is None:
            root = self.roots[".".join(words)] = value
        for part in _parts(value, words):
            self.parts.append(part)
            for slot, entry in part.slots():
                self.slots.append(slot)
                self._walk(entry, slot.words, root)


def _is_foreign(value: Any) -> bool:
    """Whether a value is an object of Python's, torch's or ours, which is not looked into."""
    plain = isinstance(
        value,
        nn.Module
        | dict
        | list
        | tuple
        | types.FunctionType
        | types.MethodType
        | functools.partial
        | types.SimpleNamespace,
    )
    return is_from(type(value), STANDARD | LIBRARIES) and not plain


def is_from(kind: Any, packages: Collection[str]) -> bool:
    """Whether a class or a function is of one of some packages."""
    return str(kind.__module__).partition(".")[0] in packages


def _parts(value: Any, words: tuple[str, ...]) -> Iterator[Part]:
    """What is inside of a value."""
    if isinstance(value, types.FunctionType):
        yield from closed_over(value, words)
        for name in dict.fromkeys(global_names(value.__code__)):
            if _is_own(value, value.__globals__.get(name, sys)):
                yield Part(value.__globals__, words, frozenset((name,)))
        return
    yield from (part for part in held(value, words) if len(part.look()[0]) <= _MOST)
    if hasattr(value, "__dict__") and not isinstance(value, types.MethodType):
        yield Part(vars(value), words)
        for kind in type(value).__mro__:
            if not is_from(kind, STANDARD | LIBRARIES):
                # Methods may read tensors that are globals of their file.
                methods = [
                    method
                    for method in vars(kind).values()
                    if isinstance(method, types.FunctionType)
                ]
                yield from (Part({"__func__": method}, words) for method in methods)


def held(value: Any, words: tuple[str, ...]) -> Iterator[Part]:
    """What a value has beside its attributes, and those that its class has slots for."""
    if isinstance(value, types.MethodType):
        yield Part({"__self__": value.__self__, "__func__": value.__func__}, words)
    elif isinstance(value, functools.partial):
        yield from (Part({"__func__": value.func}, words), Part(value.args, words))
        yield Part(value.keywords, words)
    elif isinstance(value, dict | list | tuple):
        yield Part(value, words)
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    there = frozenset(name for name in slots if not name.startswith("__"))
    if there:
        yield Part(value, words, there)


def closed_over(function: types.FunctionType, words: tuple[str, ...]) -> Iterator[Part]:
    """The cells and defaults of a function."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from (Part(cell, words, frozenset((name,))) for name, cell in cells)
    yield Part(function.__defaults__ or (), words)
    yield Part(function.__kwdefaults__ or {}, words)


def _is_own(function: types.FunctionType, value: Any) -> bool:
    """Whether a global is looked at: functions only of the same file."""
    if isinstance(value, types.FunctionType):
        return value.__globals__ is function.__globals__
    return not (inspect.isroutine(value) or isinstance(value, type | types.ModuleType))


@attrs.frozen
class Change:
    """What a run of the step has left in a slot."""

    slot: Slot
    before: Any
    after: Any


@contextmanager
def state_kept(places: Places, values: Mapping[Slot, Any]) -> Iterator[list[Change]]:
    """While a step runs, with other `values` in some slots: all slots are put back afterwards as
    they were. Gives a list, which has then what the run has left in them."""
    before = places.now()
    lists = [(container, list(container)) for container in places.lists()]
    for slot, value in values.items():
        slot.put(value)
    changes: list[Change] = []
    try:
        yield changes
    finally:
        after = places.now()
        for slot in {**before, **after}:
            was, new = before.get(slot, NOTHING), after.get(slot, NOTHING)
            initial = values.get(slot, was)
            if new is not initial and not is_equal(new, initial):
                changes.append(Change(slot, was, new))
            # Lists are put back as a whole, below: what a run inserts there moves what is behind.
            if new is not was and not isinstance(slot.container, list):
                slot.put(was)
        for container, entries in lists:
            container[:] = entries


def is_equal(left: Any, right: Any) -> bool:
    """Whether two values steer a step alike: simple ones, numpy's as well, and lists, tuples and
    sets of them, by their values."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if type(left) in (list, tuple):
        return len(left) == len(right) and all(map(is_equal, left, right))
    if type(left).__module__ == "numpy" and not hasattr(left, "__setitem__"):
        return bool(left.tobytes() == right.tobytes())
    if isinstance(left, float | complex):  # 0.0 is not -0.0, NaN is NaN
        return repr(left) == repr(right)
    return isinstance(left, (*SIMPLE, frozenset)) and bool(left == right)


def short(value: Any) -> str:
    """A value as an error says it."""
    return repr(value) if isinstance(value, SIMPLE) else f"a {type(value).__name__}"
