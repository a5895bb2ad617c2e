"""Functions that take options as keywords: their types, `help()` and completion are the table's."""

import inspect
from collections.abc import Callable
from textwrap import fill
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from pfeife.backend.settings.options import Options, rows

Q = ParamSpec("Q")  # the keywords of `Options`, as a type checker reads them
First = TypeVar("First")
T = TypeVar("T")


# For type checkers a call of these takes the keywords of a class. What they decorate stays what it
# is when it runs, and gets a signature and a docstring for people.


def with_options(options: Callable[Q, Options]) -> Callable[[Callable[..., T]], Callable[Q, T]]:
    """Of a function that takes options alone."""
    return with_help


def with_more_options(
    options: Callable[Q, Options],
) -> Callable[[Callable[Concatenate[First, ...], T]], Callable[Concatenate[First, Q], T]]:
    """Of a function or method that takes something before them."""
    return with_help


def with_help(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, as `help()` and completion shall see it: its options with their defaults, and
    what each of them means."""
    signature, options = inspect.signature(function), Options.__signature__
    first = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    shown = cast(Any, function)
    shown.__signature__ = signature.replace(parameters=[*first, *options.parameters.values()])
    meanings = [
        fill(f"{row.name}: {row.plain}", 96, subsequent_indent="    ", break_on_hyphens=False)
        for row in rows()
    ]
    shown.__doc__ = "\n\n".join([inspect.cleandoc(function.__doc__ or ""), "\n".join(meanings)])
    return function
