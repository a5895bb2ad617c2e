"""What all ranks do, or none."""

from collections.abc import Callable
from typing import TypeVar, cast

from pfeife.runtime.distributed.world.world import World

T = TypeVar("T")


def together(do: Callable[[], T], world: World | None, what: str) -> T:
    """What `do` gives. If it raises ValueError on one rank, all raise it (collective), since the
    others would wait for messages of a rank that has gone; alone a process just raises."""
    result: T | None = None
    refused: ValueError | None = None
    try:
        result = do()
    except ValueError as error:
        refused = error
    # Also where nothing was refused here: the others have to hear that, too.
    if world is not None:
        world.agreed("", what, refused=refused)
    if refused is not None:
        raise refused
    return cast(T, result)
