"""Where the ranks wait for one another in somebody else's loop."""

from typing import Any

from pfeife.runtime.distributed.batches.rank0_broadcast import Announced
from pfeife.runtime.distributed.liveness.heartbeat import Activity
from pfeife.runtime.distributed.process_group import world_so_far
from pfeife.runtime.failure import CollectiveError


def together(what: str) -> None:
    """Waits until all ranks are here. Raises ValueError if one calls something else, PipelineError
    if one does not come."""
    world = world_so_far()
    if world is not None:
        with world.busy(lambda: Activity(what)):
            world.agreed("", what)


def from_main(value: Any, what: str) -> Any:
    """What rank 0 has, on all: plain data such as numbers, texts, lists, tuples and dicts. Raises
    as `together`, and ValueError for tensors and anything else."""
    world = world_so_far()
    if world is None:
        return value

    announcement = Announced(what)(world, lambda: value)
    assert announcement is not None
    structure, _ = announcement
    if structure.tensors:
        shape = list(structure.tensors[0].shape)
        raise CollectiveError(f"{what} of a tensor {shape}: give its numbers")
    return structure.filled(())
