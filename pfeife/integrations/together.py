"""Where the ranks wait for one another in somebody else's loop."""

import json
from typing import Any

from pfeife.runtime.distributed.heartbeat import Doing
from pfeife.runtime.distributed.process_group import world_so_far


def together(what: str) -> None:
    """Waits until all ranks are here. Raises ValueError if one calls something else, PipelineError
    if one does not come."""
    world = world_so_far()
    if world is not None:
        with world.busy(lambda: Doing(what)):
            world.agreed("", what)


def from_main(value: Any, what: str) -> Any:
    """What rank 0 has, on all: numbers, texts, lists and dicts of them. Raises as `together`, and
    ValueError for anything else."""
    world = world_so_far()
    if world is None:
        return value
    with world.busy(lambda: Doing(what)):
        try:
            text, refused = json.dumps(value) if world.rank == 0 else "", None
        except TypeError as error:
            text, refused = "", ValueError(f"{what} of {value!r}: {error}")
        world.agreed("", what, refused=refused)
        return json.loads(world.from_rank_zero(text))
