"""Which code of the user's a run of a step executes, and what that asks of the world outside.

Python's profiler tells of every function that is called while a step is traced. The names in the
code of these functions are those by which they can read what steers the step: `args.beta`, say.
"""

import contextlib
import datetime
import dis
import functools
import gc
import io
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, MethodDescriptorType, ModuleType
from typing import Any

import attrs
import torch

from pfeife.frontend.watch.user_lines import place

Globals = dict[str, Any]
STANDARD = frozenset(sys.stdlib_module_names)
EVERY = "="  # among the names of environment variables: all of them (none is called so)
_PACKAGES = Path(torch.__file__).parents[1]
LIBRARIES = frozenset(  # what is below a step, not part of it
    {"torch", "torchgen", "functorch", "triton", "numpy", "sympy", "mpmath", "networkx", "pfeife"}
)
_LIBRARY_FILES = (
    *(f"{_PACKAGES / name}{os.sep}" for name in LIBRARIES),
    f"{Path(__file__).parents[2]}{os.sep}",
)
_INNER_FILES = (
    *(f"{_PACKAGES / 'torch' / name}" for name in ("_", "fx", "utils/_", "overrides")),
    *(f"{_PACKAGES / name}{os.sep}" for name in ("sympy", "mpmath")),
    f"{Path(__file__).parents[2]}{os.sep}",
)
_STANDARD_FILES = (f"{sysconfig.get_path('stdlib')}{os.sep}", "<frozen")
# They read files for themselves: to import, to show lines, to log.
_FOR_THEMSELVES = (
    *("importlib", "_frozen_importlib", "zipimport", "linecache", "tokenize", "inspect"),
    *("traceback", "logging", "warnings"),
)
_FOR_THE_USER = ("torch.serialization", "numpy.lib")
_OF_FILES = {
    *("open", "stat", "lstat", "listdir", "scandir", "access", "readlink", "read", "pread"),
    *("fork_exec", "posix_spawn", "system"),
}
_OF_STREAMS = {
    *("read", "read1", "readinto", "readline", "readlines", "readall", "recv", "recv_into"),
    *("recvfrom", "connect", "accept", "execute", "fetchone", "fetchall", "fetchmany"),
}
_SYSTEM = ("_io", "io", "posix", "nt", "_posixsubprocess", "_socket", "_ssl", "_sqlite3", "sqlite3")
_FROM_FILES = {"fromfile", "from_file"}
_RANDOM = {"urandom", "getrandom"}
_READING = _OF_FILES | _OF_STREAMS | _FROM_FILES | _RANDOM
# What reads attributes whose names the code need not have, and files of Python's that do so.
_READERS = {
    *("vars", "__dict__", "dir", "__getattribute__", "getmembers", "attrgetter", "dumps"),
}
_READING_FILES = ("dataclasses.py", "copy.py", "pickle.py", f"json{os.sep}encoder.py", "pprint.py")
_BY_NAME = ("getattr", "hasattr")
_READ_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_GLOBAL = (*_READ_GLOBAL, "STORE_GLOBAL", "DELETE_GLOBAL")
_READ_VARIABLE = type(os.environ).__getitem__.__code__
_READ_VARIABLES = type(os.environ).__iter__.__code__


@attrs.frozen
class Executed:
    """The code of the user's that has run, with its globals, by identity; the lines that asked the
    world outside, with what they asked; the environment's variables that were read; the files of
    Python's that read attributes for the user's code; the code of others that it calls."""

    codes: dict[int, tuple[CodeType, Globals]] = attrs.field(factory=dict)
    questions: list[str] = attrs.field(factory=list)
    variables: set[str] = attrs.field(factory=set)
    readers: set[str] = attrs.field(factory=set)
    callees: dict[int, CodeType] = attrs.field(factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """The names of the code and in it, and the texts, which can be names too; and those in what
        it calls, such as `scheduler.get_last_lr()`."""
        names = {name for code, _ in self.codes.values() for name in _names_and_texts(code)}
        names |= {code.co_name for code, _ in self.codes.values()}
        return frozenset(names.union(*(code.co_names for code in self.callees.values())))

    @property
    def reads_all(self) -> bool:
        """Whether the code reads attributes whose names are not in it."""
        return bool(self.readers) or any(map(_computes_names, (c for c, _ in self.codes.values())))

    def globals(self) -> Iterator[tuple[Globals, frozenset[str]]]:
        """The globals of the code, and the names that it looks up there."""
        names: dict[int, set[str]] = {}
        for code, space in self.codes.values():
            looked_up = names.setdefault(id(space), set())
            looked_up.update(global_names(code))
            if "globals" in code.co_names:
                looked_up.update(_names_and_texts(code))
        spaces = {id(space): space for _, space in self.codes.values()}
        return ((space, frozenset(names[at])) for at, space in spaces.items())

    def modules(self) -> Iterator[tuple[str, ModuleType]]:
        """The modules that the code names, as where it imports them by itself."""
        for code, space in self.codes.values():
            package = space.get("__package__") or ""
            for name in _names_and_texts(code):
                for path in (name, f"{package}.{name}"):
                    if isinstance(sys.modules.get(path), ModuleType):
                        yield path, sys.modules[path]

    def line(self, words: tuple[str, ...]) -> str:
        """The line of the code in which the last of some names stands, "" if there is none."""
        for word in reversed(words):
            for code, _ in self.codes.values():
                for instruction in dis.get_instructions(code):
                    if (
                        instruction.argval == word
                        and instruction.positions
                        and instruction.positions.lineno
                    ):
                        return place(code, instruction.positions.lineno)
        return ""

    def has_run(self, other: "Executed") -> bool:
        """Whether all code of another run is in this one."""
        return {code for code, _ in other.codes.values()} <= {c for c, _ in self.codes.values()}


@contextlib.contextmanager
def noting(executed: Executed) -> Iterator[None]:
    """Notes what this thread executes meanwhile. Another profiler waits."""
    outer = sys.getprofile()
    sys.setprofile(_hearing(executed))
    try:
        yield
    finally:
        sys.setprofile(None)
        if callable(outer):
            sys.setprofile(outer)
        elif outer is not None:  # cProfile's
            outer.enable()


@contextlib.contextmanager
def pausing() -> Iterator[None]:
    """While `noting`, what torch does by itself, of which there is most."""
    hear = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(hear)


def _hearing(executed: Executed) -> Callable[[FrameType, str, Any], None]:
    """Hears of every call."""
    codes, callees = executed.codes, executed.callees
    # Code that no step calls by itself: of torch's, and what the garbage collector calls (such as
    # hypothesis's clock).
    collecting = (getattr(callback, "__code__", None) for callback in gc.callbacks)
    inner = {id(code): code for code in collecting if code is not None}

    def hear(frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            code = frame.f_code
            # This is run for every call: torch's inner code, which is most of it, leaves first.
            if id(code) in inner:
                return
            path = code.co_filename
            if path.startswith(_INNER_FILES):
                inner[id(code)] = code  # kept, as long as its identity counts
                return
            if id(code) not in codes and not _is_standard(path) and not _is_library(path):
                codes[id(code)] = code, frame.f_globals
            # Of libraries as well: `scheduler.get_last_lr()` reads attributes for the step.
            if id(code) not in callees and frame.f_back and id(frame.f_back.f_code) in codes:
                callees[id(code)] = code
            if code is _READ_VARIABLE:
                executed.variables.add(os.fsdecode(frame.f_locals["key"]))
            elif code is _READ_VARIABLES and _users_frame(frame):
                executed.variables.add(EVERY)
            elif path.endswith(_READING_FILES) and _users_frame(frame):
                executed.readers.add(path)
        elif event == "c_call":
            # The name is looked at before the rest, since nearly all calls of C end here.
            by_user = id(frame.f_code) in codes
            if by_user or called.__name__ in _READING:
                what = _what_is_asked(called, by_user)
                asking = _users_frame(frame) if what else None
                if asking is not None:
                    line = place(asking.f_code, asking.f_lineno)
                    executed.questions.append(f"{line} {what}")

    return hear


def _what_is_asked(function: Any, by_user: bool) -> str:
    """What a function of C's asks the world outside, "" for nothing that could steer a step."""
    name, owner = function.__name__, function.__self__
    module = owner.__name__ if isinstance(owner, ModuleType) else type(owner).__module__
    if name in _RANDOM and module in _SYSTEM:
        return "draws the system's random numbers"
    in_memory = isinstance(owner, io.StringIO | io.BytesIO) and not by_user
    if (name in _READING and module in _SYSTEM and not in_memory) or name in _FROM_FILES:
        return "opens or reads a file or a connection"
    if not by_user:
        return ""
    of_date = isinstance(owner, type) and issubclass(owner, datetime.date)
    if (module == "time" and name != "sleep") or (of_date and name in ("now", "utcnow", "today")):
        return "asks for the time"
    if isinstance(owner, ModuleType | type | None):
        return ""
    kinds = type(owner).__mro__
    maker = next((k for k in kinds if isinstance(vars(k).get(name), MethodDescriptorType)), object)
    if maker.__module__.partition(".")[0] in STANDARD | LIBRARIES:
        return ""
    return f"asks a {type(owner).__name__}, an object that is not made in Python,"


def _users_frame(frame: FrameType | None) -> FrameType | None:
    """The frame of the user's for which Python's own code runs, None if it is for itself."""
    while frame is not None:
        path, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if _is_standard(path):
            if module.startswith(_FOR_THEMSELVES):
                return None
        elif _is_library(path):
            if not module.startswith(_FOR_THE_USER):
                return None
        else:
            return frame
        frame = frame.f_back
    return None


def _is_standard(path: str) -> bool:
    """Whether a file is Python's own."""
    return path.startswith(_STANDARD_FILES) and "-packages" not in path


def _is_library(path: str) -> bool:
    return path.startswith(_LIBRARY_FILES)


def global_names(code: CodeType) -> Iterator[str]:
    """The names of globals that code looks up, that of functions inside of it as well: not those of
    attributes."""
    if code.co_names:
        lookups = (
            instruction
            for instruction in dis.get_instructions(code)
            if instruction.opname in _GLOBAL
        )
        yield from (str(instruction.argval) for instruction in lookups)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from global_names(constant)


def _names_and_texts(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:  # tuples have the names of what is imported or matched
        entries = constant if isinstance(constant, tuple | frozenset) else (constant,)
        yield from (text for text in entries if isinstance(text, str))


@functools.lru_cache(4096)
def _computes_names(code: CodeType) -> bool:
    """Whether code reads attributes by names that are no constants of it."""
    if not _READERS.isdisjoint(code.co_names):
        return True
    if not {*_BY_NAME} & {*code.co_names}:
        return False
    instructions = [
        instruction for instruction in dis.get_instructions(code) if instruction.opname != "CACHE"
    ]
    starts = [
        at
        for at, instruction in enumerate(instructions)
        if instruction.opname in _READ_GLOBAL and instruction.argval in _BY_NAME
    ]
    return not all(_names_a_constant(instructions[at:]) for at in starts)


def _names_a_constant(instructions: list[dis.Instruction]) -> bool:
    """Whether `getattr`, which the first instruction loads, is called with a constant name.

    getattr    value    "name"    (default)    CALL       more on the stack: 1 .. 3 or 4, 1
    """
    depth, pushed = 0, list[dis.Instruction]()
    for instruction in instructions:
        depth += dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        if instruction.opname in ("CALL", "CALL_FUNCTION") and depth <= 1:
            back = 1 if instruction.arg == 2 else 2
            return (
                depth == 1
                and len(pushed) > back
                and isinstance(pushed[-back].argval, str)
                and (pushed[-back].opname.startswith("LOAD_CONST"))
            )
        if instruction.opname not in ("PRECALL", "NOP", "KW_NAMES", "EXTENDED_ARG", "PUSH_NULL"):
            pushed.append(instruction)
    return False
