"""Bugs that are put into the code while a test runs."""

import functools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def seed(monkeypatch: pytest.MonkeyPatch, module: Any, right: str, wrong: str) -> None:
    """Makes the functions of a module what they are with other text in one place, wherever they
    were imported; the text has as many lines."""
    source = Path(module.__file__).read_text()
    assert source.count(right) == 1, f"{module.__name__} has {source.count(right)} times {right!r}"
    whole = compile(source.replace(right, wrong), module.__file__, "exec")
    changed = 0
    for code in _functions(whole):
        function = _named(module, code.co_qualname)
        if function is not None and function.__code__ != code:
            monkeypatch.setattr(function, "__code__", code)
            changed += 1
    assert changed, f"{wrong!r} changes nothing in {module.__name__}"


def _functions(code: types.CodeType) -> Iterator[types.CodeType]:
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield one
            yield from _functions(one)


def _named(module: Any, name: str) -> Any:
    """A function of a module or its classes; None for one within another."""
    found = module
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, functools.cached_property):
        found = found.func
    found = getattr(found, "__wrapped__", found)
    return found if isinstance(found, types.FunctionType) else None
