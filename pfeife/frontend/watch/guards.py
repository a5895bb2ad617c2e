"""What steers a step that is traced: all that the code which has run can read by its names.

    args.beta       the global `args` -> its attribute `beta`, whatever class it is of
    Config.beta     the global `Config` -> the entry `beta` of the class, or of one it inherits from
    helper.SCALE    the global `helper`, a module -> `SCALE`

How a guard is made, and what it is for:

    the step has run --> Executed: its code --> names {"args", "beta", "Config", ...}
                                     |            |  (+ those of getters found on the walk: again)
                                     v            v
    Steering: the step, its arguments, the globals with these names; each object once, and in it
              a Part for each container, of an object's attributes only those with these names
                                     |
                                     v
    Guard: a Part with its keys and values now -- next call --> the same?  a trace holds
                                                                else `broken` says what, and the
                                                                step is traced anew
Simple values are compared; others are to be the same objects, with the same things inside. Tensors
are state, and may change.
"""

import argparse
import array
import collections
import contextvars
import datetime
import decimal
import fractions
import functools
import gc
import hashlib
import io
import itertools
import logging
import operator
import os
import pathlib
import random
import re
import sys
import types
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from pfeife import _torch
from pfeife.frontend.watch.executed import EVERY, LIBRARIES, STANDARD, Executed
from pfeife.frontend.watch.reachable_state import (
    SIMPLE,
    Entries,
    Part,
    Slot,
    closed_over,
    held,
    is_equal,
    is_from,
    short,
)

_FREE = object()  # stands for a value that may be any
_ENDS = (
    *(torch.Tensor, *SIMPLE, types.FrameType, types.CodeType, types.TracebackType),
    *(io.IOBase, random.Random, type(os.environ)),  # watched by other means
    *(logging.Handler, logging.Manager, logging.Formatter),
)
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
# What is compared as a whole.
_VALUES = (
    *(pathlib.PurePath, decimal.Decimal, fractions.Fraction, uuid.UUID, re.Pattern),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
)
_CACHED = type(functools.lru_cache(len))
_KEPT = 100_000  # bytes of an array that are kept; beyond that, their digest is
_CHANGEABLE = 1 << 9  # a class made by Python code: Py_TPFLAGS_HEAPTYPE


@attrs.frozen(eq=False)
class Told(Part):
    """An object without entries, of which `tell` tells what it is like now."""

    tell: Callable[[Any], Any] = attrs.field(kw_only=True)

    def look(self) -> Entries:
        """What is told now, as the only entry."""
        return ("",), (self.tell(self.container),)


@attrs.frozen(eq=False)
class Guard:
    """The entries that a part had."""

    part: Part
    keys: Sequence[Any]
    values: Sequence[Any]

    @classmethod
    def of(cls, part: Part, free: Collection[Slot] = ()) -> "Guard":
        """Guards what is there now, but for some slots."""
        keys, values = _without_ours(part.look())
        if free:
            pairs = zip(keys, values, strict=True)
            values = [_FREE if part.slot(key) in free else value for key, value in pairs]
        return cls(part, keys, values)

    def broken(self) -> str:
        """What has changed, "" if nothing has."""
        if not self.values and not self.part.container:  # as most dicts of hooks
            return ""
        keys, values = self.part.look()
        # At every call for every part: nearly always nothing has changed, and identity is cheap.
        if _are_same(keys, self.keys) and _are_same(values, self.values):
            return ""
        keys, values = _without_ours((keys, values))
        if len(keys) != len(self.keys) or not all(map(is_equal, keys, self.keys)):
            return f"what is in {'.'.join(self.part.words) or 'the step'}"
        for key, value, before in zip(keys, values, self.values, strict=True):
            tensors = isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor)
            if not (before is _FREE or tensors or is_equal(value, before)):
                name, kinds = self.part.slot(key).name, (short(before), short(value))
                was = f"which was {kinds[0]} and is {kinds[1]}"
                return f"{name}, {kinds[0] if kinds[0] == kinds[1] else was}"
        return ""


def _are_same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    if isinstance(now, range):
        return now == before
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _without_ours(entries: Entries) -> Entries:
    """Without what is Pfeife's: the hooks that guard state of other ranks come and go."""
    pairs = [pair for pair in zip(*entries, strict=True) if not _is_ours(pair[1])]
    if len(pairs) == len(entries[0]):
        return entries
    return [key for key, _ in pairs], [value for _, value in pairs]


def _is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("pfeife.")


class Steering:
    """The parts of all that steers a step: what it reaches by itself, in arguments, which have
    names, and by the globals of the code that was `executed`. An attribute of an object, a class or
    a module counts if the code has its name, or reads attributes by other means.

    Raises ValueError for an iterator of which nobody can say how far it is.
    """

    def __init__(
        self, step: Callable[..., Any], arguments: Mapping[str, Any], executed: Executed
    ) -> None:
        self._executed, self._all, names = executed, executed.reads_all, executed.names
        self._names, self._getters = frozenset[str](), set(names)
        while not self._getters <= self._names:  # the first walk finds getters, if there are any
            self._names |= self._getters
            self.parts: list[Part] = []
            # Not into `sys.modules`, from where all modules are reached.
            self._known: dict[int, Any] = {id(sys.modules): sys.modules}
            self._walk_all(step, arguments)

    def guards(self, free: Collection[Slot] = ()) -> tuple[Guard, ...]:
        """Guards all that may change, but for some slots."""
        # A tuple stays as it is; whatever can change inside of one is a part by itself.
        changing = (part for part in self.parts if not isinstance(part.container, tuple))
        return tuple(Guard.of(part, free) for part in changing)

    def _walk_all(self, step: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        executed = self._executed
        self._walk(step, ())
        for name, value in (*arguments.items(), *executed.modules()):
            self._walk(value, (name,))
        for space, names in executed.globals():
            self._enter(Part(space, (), names))
        # Torch calls these with every module; no name in the code leads to them.
        for hooks in _torch.hooks_of_all_modules():
            self._enter(Part(hooks, ("the hooks of all modules",)))
        # Of the environment only what was read: a loop that sets another variable traces nothing.
        if executed.variables:
            tell = functools.partial(_variables, frozenset(executed.variables))
            self.parts.append(Told(os.environ, ("os.environ",), tell=tell))

    def _walk(self, value: Any, words: tuple[str, ...]) -> None:
        if isinstance(value, _ENDS) or id(value) in self._known or _is_ours(type(value)):
            return
        if isinstance(value, types.BuiltinFunctionType) and isinstance(
            value.__self__, types.ModuleType
        ):
            return  # a function of C's
        self._known[id(value)] = value  # kept alive, as long as its identity counts
        # A class attribute steers as well, that of a base class too.
        for kind in (*type(value).__mro__, *(value.__mro__[1:] if isinstance(value, type) else ())):
            self._walk(kind, words)
        if isinstance(value, operator.attrgetter | operator.methodcaller):
            self._getters.update(str(value.__reduce__()).replace("'", ".").split("."))
        for part in self._parts(value, words):
            self._enter(part)

    def _enter(self, part: Part) -> None:
        self.parts.append(part)
        for slot, value in part.slots():
            if not isinstance(value, SIMPLE):
                self._walk(value, slot.words)

    def _parts(self, value: Any, words: tuple[str, ...]) -> Iterator[Part]:
        """What is inside of a value, as far as the code can read it."""
        tell = _teller(value, words, self._executed)
        if tell is not None:
            yield Told(value, words, tell=tell)
        # These are known as a whole by what is told; a logger's handlers are not the step's.
        if tell in (repr, _loudness):
            return
        if isinstance(value, type | types.ModuleType):
            yield from self._of_space(value, words)
        elif isinstance(value, types.FunctionType):
            # What has not run cannot have steered; if it runs in a later call, a name leads to it
            # which is guarded.
            if id(value.__code__) in self._executed.codes:
                yield from closed_over(value, words)
                yield Part(vars(value), words, self._names)
        else:
            yield from held(value, words)
            if isinstance(value, collections.deque | frozenset):
                yield Part(value if isinstance(value, collections.deque) else tuple(value), words)
            attributes = getattr(value, "__dict__", None)
            if not isinstance(value, types.MethodType) and isinstance(attributes, dict):
                yield Part(attributes, words, self._attributes(value))
            elif tell is None and not is_from(type(value), LIBRARIES):  # such as a proxy of a dict
                yield Part(tuple(gc.get_referents(value)), words)
            if isinstance(value, _CACHED):  # more entries do no harm to those that there are
                caches = (
                    referent for referent in gc.get_referents(value) if isinstance(referent, dict)
                )
                yield from (Part(cache, words, frozenset(cache)) for cache in caches)

    def _of_space(self, space: type | types.ModuleType, words: tuple[str, ...]) -> Iterator[Part]:
        """The entries of a class or a module that have names in the code; of torch's those without
        entries of their own."""
        entries, names = vars(space), self._names
        root = str(space.__module__ if isinstance(space, type) else space.__name__).partition(".")[
            0
        ]
        if root in LIBRARIES:
            shallow = (*SIMPLE, type, types.ModuleType, types.FunctionType)
            names &= {name for name in names & entries.keys() if isinstance(entries[name], shallow)}
        elif root not in STANDARD:
            kinds = SIMPLE if self._all else ()
            names |= {name for name, value in entries.items() if isinstance(value, kinds)}
        if isinstance(space, types.ModuleType) or space.__flags__ & _CHANGEABLE:
            yield Part(entries, words, names)

    def _attributes(self, value: Any) -> frozenset[str] | None:
        """The names of the attributes of an object that can steer, None for all: torch's code reads
        those of modules, Python's those of its own objects."""
        own = is_from(type(value), STANDARD) and not isinstance(value, _NAMESPACES)
        by_any = self._all and not is_from(type(value), LIBRARIES)
        return None if isinstance(value, nn.Module) or own or by_any else self._names


def _teller(value: Any, words: tuple[str, ...], executed: Executed) -> Callable[[Any], Any] | None:
    """What tells how an object is that has no entries, or not only."""
    kind, module = type(value), type(value).__module__
    if module == "numpy" and hasattr(value, "tobytes"):
        return _bytes
    for kinds, tell in _TELLERS:
        if isinstance(value, kinds):
            return tell
    if not isinstance(value, Iterator) or hasattr(value, "__dict__"):
        return None
    if module == "itertools" and kind not in (itertools.count, itertools.repeat):
        raise ValueError(
            f"{executed.line(words) or 'the step'} reads {'.'.join(words)}, a {kind.__name__}, and "
            "nobody can say how far it is: take from it outside of the step, and pass that as an "
            "argument"
        )
    return repr if module == "itertools" else operator.methodcaller("__reduce__")


def _bytes(value: Any) -> Any:
    data = value.tobytes()
    return data if len(data) <= _KEPT else hashlib.sha256(data).digest()


def _progress(generator: types.GeneratorType) -> tuple:
    frame = generator.gi_frame
    return () if frame is None else (frame.f_lasti, *frame.f_locals.items())


def _loudness(logger: logging.Logger) -> tuple:
    return logger.getEffectiveLevel(), logger.disabled, logger.manager.disable


def _variables(names: frozenset[str], environment: Mapping[str, str]) -> tuple:
    every = EVERY in names
    return tuple((n, environment.get(n)) for n in sorted(environment if every else names))


_TELLERS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (set, frozenset),
    (array.array | bytearray | memoryview, lambda buffer: _bytes(memoryview(buffer))),
    (contextvars.ContextVar, lambda variable: variable.get(None)),
    (weakref.ref, lambda reference: reference()),
    (types.GeneratorType, _progress),
    (logging.Logger, _loudness),
    (_VALUES, repr),
)
