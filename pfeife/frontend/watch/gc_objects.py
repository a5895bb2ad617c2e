"""Objects of a kind, wherever they are: only Python's garbage collector knows of all."""

import gc
from collections.abc import Iterable
from itertools import compress
from typing import Any


def living(*kinds: type) -> list[Any]:
    """All objects of these classes and of those that inherit from them, but for those that the
    garbage collector does not follow or was told to leave out (`gc.freeze`).

    Programs have some millions of objects and some thousands of classes, so that the classes are
    asked for their heirs, and not each object for its class's ancestors.
    """
    # `compress` and `map` run in C: a loop in Python would take some seconds here.
    classes = heirs(kinds)
    objects = gc.get_objects()
    return [*compress(objects, map(classes.__contains__, map(type, objects)))]


def heirs(kinds: Iterable[type]) -> set[type]:
    """These classes and all that inherit from them."""
    classes: set[type] = set()
    left = [*kinds]
    while left:
        kind = left.pop()
        if kind not in classes:
            classes.add(kind)
            # Not `kind.__subclasses__()`, which a metaclass does not take without an argument.
            left += type.__subclasses__(kind)
    return classes
