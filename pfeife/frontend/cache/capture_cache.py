"""Captured programs on disk, by what they were captured from (`capture_key`)."""

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from pfeife.data import plain
from pfeife.frontend.cache.program_json import StoredProgram, restore, store
from pfeife.ir.digest import fingerprint
from pfeife.ir.program import Program

log = logging.getLogger("pfeife")
Folder = str | os.PathLike[str] | None
MOST_BYTES = 2**29  # of all files of a folder
FOLDER = "captures"  # beside measured costs


def kept(
    cache: Folder,
    key: Callable[[], str],
    make: Callable[[], Program],
) -> Program:
    """The flat program that `make` gives, or the same from the folder `cache`, if somebody has had
    it with that `key` before.

    With a cache all get the program as it would be read from there, whether it was or not. What is
    damaged there, or cannot be written, is as if it were not there, and is said in the log. Raises
    what `make` raises.
    """
    if cache is None:
        return make()
    folder = Path(cache) / FOLDER
    try:
        digest = key()
    except ValueError as reason:
        log.info("this capture is not looked for in the cache: %s", reason)
        return make()
    cached = find(folder, digest)
    if cached is not None:
        log.debug("captured before: %s", _path(folder, digest))
        return cached
    program = make()
    try:
        # Read back before it is trusted: a later run gets what is written now.
        stored = store(program, digest)
        restored = restore(stored)
        if fingerprint(restored) != fingerprint(program) or store(restored, digest) != stored:
            raise ValueError("it would come back as another one")
    except ValueError as reason:
        log.info("this capture is not kept: %s", reason)
        return program
    keep(folder, stored)
    return restored


def find(folder: Path, key: str) -> Program | None:
    """The program for a key, None if there is none that can be trusted."""
    path = _path(folder, key)
    try:
        stored = plain.load(StoredProgram, path, need_checksum=True)
        if stored.key != key:
            raise ValueError(f"{path}: this is the program of another key")
        program = restore(stored)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.info("left out of the cache: %s", error)
        return None
    with contextlib.suppress(OSError):  # somebody else's file may be read all the same
        os.utime(path)  # so that what was used last goes last
    return program


def keep(folder: Path, stored: StoredProgram, most_bytes: int = MOST_BYTES) -> None:
    """Writes an entry, which readers and other writers see whole or not at all, and removes those
    that have not been used for longest beyond a number of bytes."""
    # A full disk or a folder of somebody else costs time, and is no reason to stop.
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plain.save(stored, _path(folder, stored.key))
        _shrink(folder, most_bytes)
    except (OSError, ValueError) as error:
        log.info("this capture is not kept: %s", error)


def _shrink(folder: Path, most_bytes: int) -> None:
    files = []
    for path in [*folder.glob("*.json"), *folder.glob(".pfeife-*")]:  # and what a crash has left
        with contextlib.suppress(FileNotFoundError):  # others shrink it as well
            files.append((path.stat().st_mtime_ns, path.stat().st_size, path))
    # The newest first: what is beyond the bytes has not been used for longest.
    files.sort(reverse=True)
    total = 0
    for _, size, path in files:
        total += size
        if total > most_bytes:
            path.unlink(missing_ok=True)


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.json"
