"""Measured times on disk: one small JSON file a body, found by what was measured and where."""

import hashlib
from pathlib import Path

import attrs

from pfeife.data import checks, plain


@attrs.frozen
class Measured:
    """What `repeats` runs took: median and spread (upper minus lower quartile) in seconds, the
    median of adding the gradients to others, and bytes that no graph tells of.

    `key` is the whole text that the entry is for: a foreign file does not match it.
    """

    key: str
    seconds: float = attrs.field(validator=checks.seconds)
    spread: float = attrs.field(validator=checks.seconds)
    repeats: int = attrs.field(validator=checks.positive)
    accumulate: float = attrs.field(validator=checks.seconds)
    inside: int = attrs.field(default=0, validator=checks.not_negative)


def find(folder: Path, key: str) -> Measured | None:
    """The entry for a key, None if there is none whose content and checksum can be trusted."""
    try:
        entry = plain.load(Measured, _path(folder, key), need_checksum=True)
    except (OSError, ValueError):
        return None
    # Two keys may have one file name, and a folder may come from elsewhere.
    return entry if entry.key == key else None


def keep(folder: Path, measured: Measured) -> None:
    """Writes an entry; readers and other writers see it whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    plain.save(measured, _path(folder, measured.key))


def _path(folder: Path, key: str) -> Path:
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"
