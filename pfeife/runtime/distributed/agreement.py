"""What ranks agree on, and how they differ.

Texts that ranks compare have lines of files in them, which may lie in other folders on each rank
(nodes with other homes, a container's mounts, an environment each): folders are left out of what is
compared, and are in what an error tells.
"""

import re
from collections.abc import Sequence

import attrs

# As in tracebacks, and as torch.fx writes them above the lines of a graph.
_FOLDER = re.compile(
    r"""File(?:( ")[^"\n]*[/\\](?=[^"\n]*", line)|(: )[^\n]*?[/\\](?=[^/\\\n]*:\d+ in ))"""
)


def comparable(text: str) -> str:
    """A text without the folders of the files whose lines it tells.

    >>> comparable('File "/home/me/train.py", line 3')
    'File "train.py", line 3'
    >>> comparable("# File: /mnt/a b/net.py:4 in forward, code: x/y")
    '# File: net.py:4 in forward, code: x/y'
    """
    return _FOLDER.sub(lambda match: f"File{match[1] or match[2]}", text)


@attrs.frozen
class Agreed:
    """What each rank has added to what all of them agree on."""

    numbers: tuple[int, ...]
    notes: tuple[str, ...]


def disagreement(reports: Sequence[str], groups: Sequence[Sequence[int]] = ()) -> str:
    """Why ranks do not agree, from every rank's reason not to go on, if it has one, what it has
    told of what, and what it has told its group."""
    causes, places, texts, owned = zip(*(report.split("\0", 3) for report in reports), strict=True)
    # In this order: a refusal explains all else, and at different places texts differ anyway.
    for rank, cause in enumerate(causes):
        if cause:
            return f"rank {rank}: {cause}"
    for rank, place in enumerate(places):
        if place != places[0]:
            return (
                f"rank {rank} is at {place} and rank 0 at {places[0]}: every rank must make the "
                "same calls, in the same order"
            )
    batch = "the batch of its replica" if groups else "the whole batch"
    for rank_texts, ranks in ((texts, range(len(reports))), *((owned, group) for group in groups)):
        first, *rest = ranks
        same = [comparable(text) for text in rank_texts]
        differing = [rank for rank in rest if same[rank] != same[first]]
        if differing:
            here, there = _first_difference(rank_texts[first], rank_texts[differing[0]])
            return (
                f"{places[0]}: ranks {differing} have another one than rank {first}: rank "
                f"{differing[0]} has {there} where rank {first} has {here}; every rank must run "
                f"the same script with the same options and versions, and is given {batch} "
                "(loaders that deal rows out to processes, as Accelerate's do, do not: see "
                "pfeife.integrations)"
            )
    raise AssertionError("all ranks agree")


def _first_difference(first: str, second: str) -> tuple[str, str]:
    lines, other_lines = first.splitlines(), second.splitlines()
    for at, (line, other_line) in enumerate(zip(lines, other_lines, strict=False)):
        if comparable(line) != comparable(other_line):
            return _told(lines, at), _told(other_lines, at)
    return f"{len(lines)} lines", f"{len(other_lines)} lines"


def _told(lines: Sequence[str], at: int) -> str:
    """A line of a text, and the user's line that it comes from, where torch.fx tells of one."""
    line, above = lines[at].strip(), ""
    for earlier in reversed(lines[:at]):
        if earlier.strip().startswith("#") or not earlier.strip():
            above = earlier.strip()
            break
    place = f" ({above.removeprefix('# ')})" if above.startswith("# File: ") else ""
    return f"{line!r}{place}"
