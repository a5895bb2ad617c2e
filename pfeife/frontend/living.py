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
    heirs = _heirs(kinds, set())
    objects = gc.get_objects()
    return [*compress(objects, map(heirs.__contains__, map(type, objects)))]


def _heirs(kinds: Iterable[type], found: set[type]) -> set[type]:
    for kind in set(kinds) - found:
        found.add(kind)
        _heirs(type.__subclasses__(kind), found)
    return found
