"""Where the ranks wait for one another in somebody else's loop."""

from pfeife.runtime.distributed.heartbeat import Doing
from pfeife.runtime.distributed.process_group import world_so_far


def together(what: str) -> None:
    """Waits until all ranks are here. Raises ValueError if one calls something else, PipelineError
    if one does not come."""
    world = world_so_far()
    if world is not None:
        with world.busy(lambda: Doing(what)):
            world.agreed("", what)
