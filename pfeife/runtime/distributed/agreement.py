"""What ranks agree on, and how they differ."""

from collections.abc import Sequence

import attrs


@attrs.frozen
class Agreed:
    """What each rank has added to what all of them agree on."""

    numbers: tuple[int, ...]
    notes: tuple[str, ...]


def disagreement(told: Sequence[str], groups: Sequence[Sequence[int]] = ()) -> str:
    """Why ranks do not agree, from every rank's reason not to go on, if it has one, what it has
    told of what, and what it has told its group."""
    causes, places, texts, owned = zip(*(one.split("\0", 3) for one in told), strict=True)
    for rank, cause in enumerate(causes):
        if cause:
            return f"rank {rank}: {cause}"
    for rank, place in enumerate(places):
        if place != places[0]:
            return (
                f"rank {rank} is at {place} and rank 0 at {places[0]}: every rank must make the "
                "same calls, in the same order"
            )
    given = "the batch of its replica" if groups else "the whole batch"
    for each, ranks in ((texts, range(len(told))), *((owned, group) for group in groups)):
        first, *rest = ranks
        others = [rank for rank in rest if each[rank] != each[first]]
        if others:
            here, there = _first_difference(each[first], each[others[0]])
            return (
                f"{places[0]}: ranks {others} have another one than rank {first}: rank {others[0]} "
                f"has {there!r} where rank {first} has {here!r}; every rank must run the same "
                f"script with the same options and versions, and is given {given} (loaders that "
                "deal rows out to processes, as Accelerate's do, do not: see pfeife.integrations)"
            )
    raise AssertionError("all ranks agree")


def _first_difference(one: str, other: str) -> tuple[str, str]:
    lines, others = one.splitlines(), other.splitlines()
    for line, second in zip(lines, others, strict=False):
        if line != second:
            return line.strip(), second.strip()
    return f"{len(lines)} lines", f"{len(others)} lines"
