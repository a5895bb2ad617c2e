"""What ranks agree on, and how they differ.

Texts that ranks compare have lines of files in them, which may lie in other folders on each rank
(nodes with other homes, a container's mounts, an environment each): folders are left out of what is
compared, and are in what an error tells.
"""

import hashlib
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from pfeife import _torch
from pfeife._torch import is_absent
from pfeife.data import plain
from pfeife.runtime.distributed.control.questions import encoded_text, text_bytes, text_of
from pfeife.runtime.distributed.links.connection import Connection
from pfeife.runtime.failure import CollectiveError

_SHORT = 128  # bytes of a note from which on it has a message of its own
# What a rank adds to an agreement: the digest of its text (zeros: it cannot go on), a number, the
# bytes of its note (_SHORT: it goes apart), the note, the digest of its own text.
_ADDED = struct.Struct(f"<32sqB{_SHORT}s16s")

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
    """What each rank has added to what all of them agree on, and whether all have told their groups
    the same."""

    numbers: tuple[int, ...]
    notes: tuple[str, ...]
    all_alike: bool


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


class AllRanks(ABC):
    """What each rank of a world tells all others, on tensors of its `device`: all of it is
    collective, over the `connection` of all ranks."""

    rank: int
    size: int
    device: torch.device
    connection: Connection

    @abstractmethod
    def wait(self, work: dist.Work, *, of_all: bool = False) -> None:
        """Waits for a collective operation of all ranks, or of some."""

    def broadcast(self, value: torch.Tensor, source: int, among: Connection | None = None) -> None:
        """Rank `source`'s contents of a dense tensor of bytes, in place on every rank, or on those
        of a connection."""
        through = among or self.connection
        work = through.group.broadcast(value, through.index(source))
        self.wait(work, of_all=among is None)

    def gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor of the same shape and dtype, on every rank."""
        gathered = [torch.empty_like(value) for _ in range(self.size)]
        self.wait(self.connection.group.allgather([gathered], [value]), of_all=True)
        return gathered

    def from_rank_zero(self, text: str) -> str:
        """Rank 0's text, on every rank (collective)."""
        data = text_bytes(text).to(self.device)
        size = torch.tensor([data.numel()], device=self.device)
        self.broadcast(size, 0)
        _check_length(int(size), 0)
        shared = data if self.rank == 0 else data.new_empty(int(size))
        self.broadcast(shared, 0)
        return text_of(shared)

    def decided_by_rank_zero(self, decide: Callable[[], str]) -> str:
        """What rank 0 decides, on every rank (collective). If that raises a ValueError there, all
        ranks raise a CollectiveError with its text."""
        text = ""
        if self.rank == 0:
            try:
                text = "+" + decide()
            except ValueError as error:
                text = "-" + str(error)
        shared = self.from_rank_zero(text)
        if shared.startswith("-"):
            raise CollectiveError(shared[1:])
        return shared[1:]

    def from_all_ranks(self, text: str) -> list[str]:
        """Every rank's text, on every rank (collective)."""
        data = text_bytes(text).to(self.device)
        # A gather wants tensors of one size, so the sizes come first; a text from another machine
        # is not believed to be of any length.
        sizes = [int(size) for size in self.gather(torch.tensor([len(data)], device=self.device))]
        for rank, size in enumerate(sizes):
            _check_length(size * self.size, rank)
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: len(data)] = data
        parts = zip(self.gather(padded), sizes, strict=True)
        return [text_of(part[:size]) for part, size in parts]

    def check_agreement(self, text: str, what: str) -> None:
        """Raises CollectiveError on every rank unless all ranks give the same text (collective);
        the error has the first line that differs."""
        self.agreed(text, what)

    def agreed(
        self,
        text: str,
        what: str,
        *,
        number: int = 0,
        note: str = "",
        refused: Exception | None = None,
        own: str = "",
        groups: Sequence[Sequence[int]] = (),
    ) -> Agreed:
        """What every rank adds to a text that all of them give alike (collective), and to one of
        their `own` that the ranks of each group do.

        Raises CollectiveError on every rank if the ranks are at different places of the script, by
        `what` they agree on; if the texts differ, with the first line that does; or if any rank
        cannot go on: with its own words there, and on the others with the rank in front."""
        # One gather of a fixed size while all goes well; the texts follow only if they differ.
        text = f"{what}\0{text}"
        compared = (encoded_text(comparable(part)) for part in (text, own))
        digest, own_digest = (hashlib.sha256(encoded).digest() for encoded in compared)
        noted = encoded_text(note)
        short = noted if len(noted) < _SHORT else b""
        size = min(len(noted), _SHORT)
        data = _ADDED.pack(b"" if refused else digest, number, size, short, own_digest[:16])
        packed = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        every = (_ADDED.unpack(bytes(row.tolist())) for row in self.gather(packed))
        digests, numbers, sizes, shorts, owned = zip(*every, strict=True)
        # Digests of zeros are equal where no rank can go on.
        alike = len(set(digests)) == 1 and any(digests[0])
        if not (alike and all(len({owned[rank] for rank in group}) == 1 for group in groups)):
            cause = f"{type(refused).__name__}: {refused}" if refused else ""
            reports = self.from_all_ranks(f"{cause}\0{text}\0{own}")
            raise CollectiveError(
                str(refused) if refused else disagreement(reports, groups)
            ) from refused
        if max(sizes) == _SHORT:
            return Agreed(numbers, tuple(self.from_all_ranks(note)), len({*owned}) == 1)
        notes = (encoded[:size].decode() for encoded, size in zip(shorts, sizes, strict=True))
        return Agreed(numbers, tuple(notes), len({*owned}) == 1)

    def differing(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of the tensors that are not the same on all ranks, by checksums (collective)."""
        if not tensors:
            return []
        # Checksums and not values: a model may be larger than what a rank has left.
        sums = self.checksums(tensors.values())
        wrong = torch.stack([rank_sums != sums[0] for rank_sums in sums]).any(0).tolist()
        return [name for name, differs in zip(tensors, wrong, strict=True) if differs]

    def checksums(self, tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
        """Those of some tensors, one at least, on every rank; -1 for None and for what is absent
        (collective)."""
        sums = [
            -1 if tensor is None or is_absent(tensor) else checksum(tensor) for tensor in tensors
        ]
        return self.gather(torch.tensor(sums, device=self.device))


def _check_length(size: int, rank: int) -> None:
    if not 0 <= size <= plain.LARGEST_FILE:
        raise ValueError(f"rank {rank} wants to send {size} bytes of text to all; that is too much")


def checksum(tensor: torch.Tensor) -> int:
    """A number of 63 bits that depends on every byte of a tensor and on its place. Raises
    ValueError for one whose values are not here."""
    if is_absent(tensor):
        raise _torch.record_of(tensor).refusal("the comparison of what ranks are given")
    data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1
