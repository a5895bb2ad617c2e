"""Python's collector while graphs are made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OBJECTS = 50_000  # Python's own are 700 to 2,000


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Makes Python look for garbage more seldom.

    Nodes of graphs refer to one another in circles, and there are hundreds of thousands. Python's
    collector goes through all of them whenever a few hundred new ones are there: that is half of
    the time of planning. What nobody needs stays a little longer instead (for a plan of a model of
    32 layers 80 MiB).
    """
    before = gc.get_threshold()
    # 0: off, which is somebody else's decision, as a larger number is.
    if not 0 < before[0] < _OBJECTS:
        yield
        return
    gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
