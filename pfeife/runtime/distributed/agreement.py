"""What ranks agree on, and how they differ."""

from collections.abc import Sequence

import attrs


@attrs.frozen
class Agreed:
    """What each rank has added to what all of them agree on."""

    numbers: tuple[int, ...]
    notes: tuple[str, ...]


def disagreement(told: Sequence[str]) -> str:
    """Why ranks do not agree, from every rank's reason not to go on, if it has one, and what it
    has told of what."""
    causes, places, texts = zip(*(one.split("\0", 2) for one in told), strict=True)
    for rank, cause in enumerate(causes):
        if cause:
            return f"rank {rank}: {cause}"
    for rank, place in enumerate(places):
        if place != places[0]:
            return (
                f"rank {rank} is at {place} and rank 0 at {places[0]}: every rank must make the "
                "same calls, in the same order"
            )
    others = [rank for rank, text in enumerate(texts) if text != texts[0]]
    here, there = _first_difference(texts[0], texts[others[0]])
    return (
        f"{places[0]}: ranks {others} have another one than rank 0: rank {others[0]} has {there!r} "
        f"where rank 0 has {here!r}; every rank must run the same script with the same options "
        "and versions, and is given the whole batch"
    )


def _first_difference(one: str, other: str) -> tuple[str, str]:
    lines, others = one.splitlines(), other.splitlines()
    for line, second in zip(lines, others, strict=False):
        if line != second:
            return line.strip(), second.strip()
    return f"{len(lines)} lines", f"{len(others)} lines"
