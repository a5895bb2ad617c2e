"""What a step reaches by itself: the tensors that it may read, and the values that steer it.

A step is a function with closures and globals, a method, or a module. From there on everything that
lies in modules, lists, dicts, cells and plain objects is a `Slot` of its container:

    def step(x): return net(x) * scale        cell `net` -> Module -> _modules["0"] -> ...
                                              cell `scale` -> a tensor
"""

import collections
import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn

# What has entries; any other object has those that its class has slots for.
Container = dict[Any, Any] | list[Any] | tuple[Any, ...] | types.CellType | Any
MOST = 10_000  # entries of a list or dict that are looked at
SIMPLE = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
_UNSAID = ("_parameters", "_buffers", "_modules", "__self__", "__func__")
_LOOK_UP = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
_ENDS = (torch.Tensor, type, types.ModuleType, *SIMPLE)


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
        return ".".join(self.words) or "step"

    @property
    def is_open(self) -> bool:
        """Whether something else can be put there for a while, whatever it belongs to."""
        return isinstance(self.container, dict | list | types.CellType)

    def get(self) -> Any:
        try:
            if isinstance(self.container, types.CellType):
                return self.container.cell_contents
            if isinstance(self.container, dict):  # perhaps of a class that makes what it gives
                return dict.__getitem__(self.container, self.key)
            if isinstance(self.container, list | tuple):
                return self.container[self.key]
            return getattr(self.container, self.key)
        except (LookupError, ValueError, AttributeError):
            return NOTHING

    def put(self, value: Any) -> None:
        if isinstance(self.container, types.CellType):
            self.container.cell_contents = value
        elif not isinstance(self.container, dict | list):
            setattr(self.container, self.key, value)
        elif value is NOTHING:
            del self.container[self.key]
        else:
            self.container[self.key] = value


class Places:
    """Everything that a step reaches when this is made, by itself or in arguments, which have
    names. `roots` has the outermost modules by what the step calls them."""

    def __init__(self, step: Callable[..., Any], arguments: Mapping[str, Any]):
        self.slots: list[Slot] = []
        self.counted: list[tuple[Any, tuple[str, ...]]] = []  # what has more than slots
        self.roots: dict[str, nn.Module] = {}
        self._containers: dict[int, tuple[Container, tuple[str, ...]]] = {}
        self._parts: set[int] = set()  # containers of which only the slots count
        self._known: dict[int, Any] = {}
        self._walk(step, (), None)
        for name, value in arguments.items():
            self._walk(value, (name,), None)

    def now(self) -> dict[Slot, Any]:
        """What is in every slot, and in new ones of the same containers."""
        found = {slot: slot.get() for slot in self.slots}
        for at, (container, words) in self._containers.items():
            if at in self._parts or not isinstance(container, dict | list):
                continue
            pairs = dict.items(container) if isinstance(container, dict) else enumerate(container)
            for key, value in list(pairs):
                found.setdefault(Slot(container, key, (*words, str(key))), value)
        return found

    def lists(self) -> list[list[Any]]:
        return [one for one, _ in self._containers.values() if isinstance(one, list)]

    def contents(self) -> list[tuple[Any, Any, tuple[str, ...]]]:
        """Dicts, lists, sets and the like with what tells whether they have other entries, and the
        words for them."""
        return [(one, contents_of(one), words) for one, words in self.counted]

    def _walk(self, value: Any, words: tuple[str, ...], root: nn.Module | None) -> None:
        if isinstance(value, _ENDS) or id(value) in self._known:
            return
        self._known[id(value)] = value  # kept alive, as long as its identity counts
        if contents_of(value) is not None:
            self.counted.append((value, words))
        if _is_foreign(value):
            return
        if isinstance(value, nn.Module) and root is None:
            root = self.roots[".".join(words)] = value
        for empty in (value, getattr(value, "__dict__", None)):  # so far
            if isinstance(empty, dict | list) and not _count(empty):
                self._containers.setdefault(id(empty), (empty, words))
        for container, key, one, whole in _inside(value):
            said = words if key in _UNSAID or not isinstance(key, str | int) else (*words, str(key))
            if id(container) not in self._containers:
                self._containers[id(container)] = container, words
                if container is not value and whole and isinstance(container, dict):
                    self.counted.append((container, words))
            if not whole:
                self._parts.add(id(container))
            self.slots.append(Slot(container, key, said))
            self._walk(one, said, root)


def contents_of(value: Any) -> Any:
    """What tells whether something has other entries than before, None for what has none: the keys
    of a dict, how many a list has, all of a set, a queue or an array."""
    if isinstance(value, dict):  # the guards of state that other ranks own come and go
        pairs = dict.items(value) if _count(value) <= MOST else ()
        return tuple(key for key, one in pairs if not _is_pfeifes(one)) or _count(value) > MOST
    if isinstance(value, list):
        return _count(value)
    if isinstance(value, set | collections.deque) and len(value) <= MOST:
        return repr(value)
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return value.tobytes() if value.size <= MOST else None
    return None


def _count(value: Any) -> int:
    """How many entries there are, whatever the value's own class says of them."""
    kind = next(kind for kind in (dict, list, tuple) if isinstance(value, kind))
    return int(kind.__len__(value))


def _is_pfeifes(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("pfeife.")


def _is_foreign(value: Any) -> bool:
    """Whether a value is an object of Python's, torch's or ours, which is not looked into."""
    kind = type(value)
    outer = kind.__module__.partition(".")[0]
    known = outer in sys.stdlib_module_names or outer in ("torch", "numpy", "pfeife")
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
    return known and not plain


def _inside(value: Any) -> Iterator[tuple[Container, Any, Any, bool]]:
    """The entries of what is inside of a value, their containers, and whether all entries of these
    belong to it."""
    if isinstance(value, types.MethodType):
        for pair in ({"__self__": value.__self__}, {"__func__": value.__func__}):
            yield from ((pair, key, one, True) for key, one in pair.items())
        return
    if isinstance(value, types.FunctionType):
        yield from _of_function(value)
        return
    if isinstance(value, functools.partial):
        yield {"__func__": value.func}, "__func__", value.func, True
        yield from ((value.args, key, one, True) for key, one in enumerate(value.args))
        yield from ((value.keywords, key, one, True) for key, one in value.keywords.items())
    elif isinstance(value, dict) and _count(value) <= MOST:
        yield from ((value, key, one, True) for key, one in list(dict.items(value)))
    elif isinstance(value, list | tuple) and _count(value) <= MOST:
        kind: Any = list if isinstance(value, list) else tuple
        yield from ((value, key, one, True) for key, one in enumerate(kind.__iter__(value)))
    if hasattr(value, "__dict__"):
        yield from ((vars(value), key, one, True) for key, one in list(vars(value).items()))
        yield from _of_class(type(value))
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    yield from ((value, key, getattr(value, key), True) for key in slots if _is_there(value, key))


def _is_there(value: Any, key: str) -> bool:
    return not key.startswith("__") and hasattr(value, key)


def _of_class(kind: type) -> Iterator[tuple[Container, Any, Any, bool]]:
    """The methods of a class and of those that it inherits from."""
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] in (*sys.stdlib_module_names, "torch"):
            continue
        methods = {k: v for k, v in vars(one).items() if isinstance(v, types.FunctionType)}
        yield from (({"__func__": v}, "__func__", v, True) for v in methods.values())


def _of_function(function: types.FunctionType) -> Iterator[tuple[Container, Any, Any, bool]]:
    """Cells, defaults, and the globals that a function names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with_contents = Slot(cell, name, ()).get()
        if with_contents is not NOTHING:  # bound already
            yield cell, name, with_contents, True
    defaults = function.__defaults__ or ()
    yield from ((defaults, key, one, True) for key, one in enumerate(defaults))
    named = function.__kwdefaults__ or {}
    yield from ((named, key, one, True) for key, one in named.items())
    for name in dict.fromkeys(_names(function.__code__)):
        if _is_own(function, function.__globals__.get(name, sys)):
            yield function.__globals__, name, function.__globals__[name], False


def _names(code: types.CodeType) -> Iterator[str]:
    """All names of globals that a function and those inside of it look up: not of attributes."""
    if code.co_names:
        looked = (one for one in dis.get_instructions(code) if one.opname in _LOOK_UP)
        yield from (str(one.argval) for one in looked)
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _names(one)


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


class Held:
    """While a step runs, with other `values` in some slots: all slots are put back afterwards as
    they were. `changes` says what the run has left in them."""

    def __init__(self, places: Places, values: Mapping[Slot, Any]):
        self.places, self.values = places, values
        self.changes: list[Change] = []

    def __enter__(self) -> "Held":
        self.before = self.places.now()
        self.lists = [(one, list(one)) for one in self.places.lists()]
        for slot, value in self.values.items():
            slot.put(value)
        return self

    def __exit__(self, *_: Any) -> None:
        after = self.places.now()
        for slot in {**self.before, **after}:
            was, new = self.before.get(slot, NOTHING), after.get(slot, NOTHING)
            given = self.values.get(slot, was)
            if new is not given and not is_equal(new, given):
                self.changes.append(Change(slot, was, new))
            if new is not was and not isinstance(slot.container, list):
                slot.put(was)
        for container, entries in self.lists:
            container[:] = entries


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values steer a step alike: simple ones, and lists and tuples of them, by their
    values."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return isinstance(one, SIMPLE) and one == other


def short(value: Any) -> str:
    """A value as an error says it."""
    return repr(value) if isinstance(value, SIMPLE) else f"a {type(value).__name__}"
