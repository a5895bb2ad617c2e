"""How processes come together: by torchrun, or by hand."""

import atexit
import os
import re
from datetime import timedelta

import torch
import torch.distributed as dist

from pfeife.runtime.distributed.liveness.heartbeat import kept_by_torchrun
from pfeife.runtime.distributed.liveness.interface import choose_interface
from pfeife.runtime.distributed.liveness.last_words import tell_torchrun
from pfeife.runtime.distributed.liveness.rendezvous import rendezvous
from pfeife.runtime.distributed.liveness.starting import start_group
from pfeife.runtime.distributed.world.ownership import Ownership
from pfeife.runtime.distributed.world.world import GRACE, World
from pfeife.runtime.failure import Failure, PipelineError
from pfeife.runtime.threads import started

TIMEOUT = 300.0  # seconds of silence after which a rank is given up, unless an option says other

# torch.distributed has one default process group, and so there is one world for it.
_worlds: list[World] = []


def join_world(device: torch.device, timeout: float | None = None) -> World | None:
    """The processes that this one works with (collective the first time), None if it is alone.

    Initialises the default process group if torchrun started several processes and nobody has
    done so. After a failure there is a new world: all ranks connect anew. Raises PipelineError,
    naming them, if ranks do not arrive within `timeout` seconds.
    """
    limit = TIMEOUT if timeout is None else timeout
    if not _worlds:
        _choose_interface()
    if not dist.is_initialized() and number_of("WORLD_SIZE", 1, default="1") > 1:
        _initialize(device, limit)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    current = _worlds[0] if _worlds and _worlds[0].default is dist.group.WORLD else None
    # An option of one step holds for all that come later, unless they say another.
    if current is not None and timeout is None:
        limit = current.timeout
    # A failure that has not become an exception here yet keeps its world until it has.
    if current is not None and not (current.failure and current.raised):
        current.timeout = limit
        return current
    trained = None if current else _trained_before()
    latest = World(device, limit, current, trained)
    # After the new one is there: it takes over the connections to the store.
    for world in _worlds:
        world.close()
    _worlds[:] = [latest]
    atexit.unregister(_leave)
    atexit.register(_leave)
    if trained is not None:
        latest.check_agreement(str(len(trained.owned)), "what was trained in another process group")
    return latest


def _trained_before() -> Ownership | None:
    """What ranks have trained in a process group that was destroyed. The same ranks go on with it;
    to others it is state like any, which they have to have alike."""
    before = _worlds[0] if _worlds else None
    here = dist.get_rank(), dist.get_world_size()
    return before.ownership if before and (before.rank, before.size) == here else None


def is_one_of_several() -> bool:
    """Whether there are several processes, whose world may yet have to be joined."""
    if dist.is_initialized():
        return dist.get_world_size() > 1
    return number_of("WORLD_SIZE", 1, default="1") > 1


def joined() -> World | None:
    """The world that this process has joined last, be it as it may, None without one."""
    return _worlds[0] if _worlds else None


def world_so_far() -> World | None:
    """The world that this process is in already (collective after a failure), None without one."""
    if not _worlds or not dist.is_initialized() or _worlds[0].default is not dist.group.WORLD:
        return None
    return join_world(_worlds[0].device)


def _choose_interface() -> None:
    """Of ranks that torchrun has started on several nodes."""
    host, size = os.environ.get("MASTER_ADDR"), number_of("WORLD_SIZE", 1, default="1")
    if host and number_of("LOCAL_WORLD_SIZE", 1, default=str(size)) < size:
        choose_interface(host, number_of("MASTER_PORT", 1, 2**16 - 1))


def _initialize(device: torch.device, timeout: float) -> None:
    size, port = number_of("WORLD_SIZE", 1), number_of("MASTER_PORT", 1, 2**16 - 1)
    rank = number_of("RANK", 0, size - 1)
    host = os.environ.get("MASTER_ADDR", "localhost")
    limit = timedelta(seconds=timeout)
    keeps_store = rank == 0 and not kept_by_torchrun()
    try:
        keeper = dist.TCPStore(
            host, port, size, keeps_store, limit, False, multi_tenant=keeps_store
        )
    except RuntimeError as error:
        who = "torchrun" if kept_by_torchrun() else "rank 0"
        cause = f"nobody answers at {host}:{port}, where {who} should: {error}"
        raise PipelineError(Failure(None if kept_by_torchrun() else 0, "", cause)) from None
    # Apart from the keys of an attempt before a restart, or of a start that has failed.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"pfeife attempt {attempt}", keeper)
    store = dist.PrefixStore(f"start {rendezvous(store, rank, size, timeout)}", store)
    if device.type == "cuda":
        torch.cuda.set_device(number_of("LOCAL_RANK", 0, torch.cuda.device_count() - 1, "0"))
    backend = "nccl" if device.type == "cuda" else "gloo"
    start_group(backend, store, rank, size)
    atexit.register(leave_world)


def number_of(name: str, least: int, most: int | None = None, default: str = "") -> int:
    """A variable of the environment that torchrun sets. Raises ValueError for none from `least` to
    `most`."""
    text = os.environ.get(name, default)
    number = int(text) if re.fullmatch(r"-?\d{1,9}", text.strip()) else None
    if number is None or number < least or (most is not None and number > most):
        limit = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(
            f"the environment has {name}={text!r}: must be a number {limit}; torchrun sets "
            "WORLD_SIZE, RANK (from 0 to WORLD_SIZE - 1), MASTER_ADDR and MASTER_PORT"
        )
    return number


def _leave() -> None:
    tell_torchrun()
    while _worlds:
        _worlds.pop().leave()


def leave_world() -> None:
    """Ends the default process group if there is one and nothing is in it. NCCL's waits for the
    other ranks, which after a failure may not come: it is given some seconds."""
    # A thread that is still inside would find the group gone below it.
    used = any(world.inside for world in _worlds)
    _leave()
    if dist.is_initialized() and not used:
        started("destroys", dist.destroy_process_group).join(GRACE)
