"""Measured times on disk: one small JSON file a body, found by what was measured and where."""

import hashlib
from pathlib import Path

import attrs

from pfeife import plain


@attrs.frozen
class Measured:
    """What `repeats` runs took: median and spread (upper minus lower quartile) in seconds, and
    the median of adding the gradients to others.

    `key` is the whole text that the entry is for: a damaged or foreign file does not match it.
    """

    key: str
    seconds: float
    spread: float
    repeats: int
    accumulate: float


def find(folder: Path, key: str) -> Measured | None:
    """The entry for a key, None if there is none that can be trusted."""
    try:
        found = plain.load(Measured, _path(folder, key))
    except (OSError, ValueError):
        return None
    sound = found.key == key and found.seconds > 0 and found.spread >= 0 and found.repeats > 0
    sound = sound and found.accumulate >= 0
    return found if sound else None


def keep(folder: Path, measured: Measured) -> None:
    """Writes an entry; readers and other writers see it whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    plain.save(measured, _path(folder, measured.key))


def _path(folder: Path, key: str) -> Path:
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"
