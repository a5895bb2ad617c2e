"""Machines to plan for: profiles that come with the package, and files of one's own."""

import os
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path

import attrs
import torch

from pfeife.data import plain
from pfeife.data.machine import Machine

_PROFILES = resources.files("pfeife.cost") / "machines"
_UNKNOWN_GPU = "h100-sxm"


def machines() -> tuple[str, ...]:
    """The names of the profiles that come with the package."""
    names = (file.name for file in _PROFILES.iterdir())
    return tuple(sorted(n.removesuffix(".json") for n in names if n.endswith(".json")))


def machine(name: str | os.PathLike[str]) -> Machine:
    """The shipped profile of this name, or the one in a JSON file that `plain.save` could have
    written. Raises ValueError if it is neither, or the file is damaged.

    >>> machine("h100-sxm").memory  # bytes
    80000000000
    >>> machine("h100")
    Traceback (most recent call last):
    ValueError: machine 'h100' is no file and none of [...]; the nearest is 'h100-sxm' (...)
    """
    # Names first: a file of the same name in the working directory must not change a profile.
    if name in machines():
        return plain.from_json(Machine, (_PROFILES / f"{name}.json").read_text(encoding="utf-8"))
    try:
        return plain.load(Machine, Path(name))
    except OSError as error:
        # Without a cutoff there is always a nearest one.
        near = get_close_matches(str(name).lower(), machines(), n=1, cutoff=0.0)
        raise ValueError(
            f"machine {str(name)!r} is no file and none of {list(machines())}; "
            f"the nearest is {near[0]!r} ({error.strerror})"
        ) from None


def machine_called(device_name: str) -> Machine | None:
    """The shipped profile of a GPU, by what torch.cuda.get_device_name calls it."""
    for profile in map(machine, machines()):
        if any(fnmatchcase(device_name, pattern) for pattern in profile.device_names):
            return profile
    return None


def default_machine(device: torch.device) -> Machine:
    """A guess at the machine that a device belongs to, good enough to balance stages."""
    # Links and rates of a profile are its own; how much memory there is can be asked.
    if device.type == "cpu":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return _with_memory(machine("cpu-core"), pages)
    if device.type == "cuda" and (device.index or 0) < torch.cuda.device_count():
        profile = machine_called(torch.cuda.get_device_name(device)) or machine(_UNKNOWN_GPU)
        return _with_memory(profile, torch.cuda.get_device_properties(device).total_memory)
    return machine(_UNKNOWN_GPU)


def _with_memory(profile: Machine, memory: int) -> Machine:
    sources = profile.sources | {"memory": "what this computer says that it has"}
    return attrs.evolve(profile, memory=memory, sources=sources)
