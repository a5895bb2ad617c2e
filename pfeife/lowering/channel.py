"""The messages from one rank to another, and which of them are posted ahead."""

from collections.abc import Sequence
from functools import cached_property

import attrs

from pfeife.lowering.envelope import Envelope

AHEAD = 2**20  # bytes of a channel that may have their buffers before they are asked for
FEWEST, MOST = 2, 1024  # messages ahead, whatever their size
# The same on CUDA, where a receive that waits for the one before it may keep other streams waiting,
# which share a hardware queue with it.
MOST_QUEUED = 1


@attrs.frozen(slots=False)
class Channel:
    """The messages that one rank will receive from another, in their order; how many at `most` are
    posted ahead."""

    envelopes: tuple[Envelope, ...]
    most: int = MOST

    @cached_property
    def ahead(self) -> list[int]:
        """How many have had their receives posted when 0, 1, 2, ... of them have been taken.

        None is posted before the sizes of one that is sent before it are known.
        """
        counts = posted_ahead([envelope.bytes for envelope in self.envelopes], self.most)
        border = len(self.envelopes)
        for taken in reversed(range(len(self.envelopes))):
            # the first message from here on that announces sizes is the last that may be posted
            if self.envelopes[taken].opening is not self.envelopes[taken]:
                border = taken + 1
            counts[taken] = min(counts[taken], border)
        return counts


def posted_ahead(sizes: Sequence[int], most: int = MOST) -> list[int]:
    """How many of a channel's messages (of so many bytes, in their order) have had their receives
    posted when 0, 1, 2, ... of them have been taken.

    At least the next two are, and as many as fit into `AHEAD` bytes, up to `most`; they are posted
    several at a time, when half of them are gone: each tells the sender, whose thread then wakes up
    once for all, and keeps it from sending meanwhile.

        taken     0  1  2  3  4 ...     for messages of a quarter of `AHEAD`
        posted    4  4  6  6  8 ...
    """
    counts, posted, ahead = [], 0, 0
    for taken in range(len(sizes) + 1):
        if posted - taken <= max(ahead // 2, FEWEST - 1):
            posted = _filled(sizes, taken, posted, most)
            ahead = posted - taken
        counts.append(posted)
    return counts


def _filled(sizes: Sequence[int], taken: int, posted: int, most: int = MOST) -> int:
    """How many are posted once there is room for no more."""
    held = sum(sizes[taken:posted])
    while posted < len(sizes) and posted - taken < most:
        if posted - taken >= FEWEST and held + sizes[posted] > AHEAD:
            break
        held += sizes[posted]
        posted += 1
    return posted


def window(sizes: Sequence[int], microbatches: int) -> int:
    """Bytes of the messages of a channel that are posted beside the first one, where every
    microbatch sends messages of such sizes."""
    later = (list(sizes) * min(microbatches, MOST + 1))[1:]
    return sum(later[: _filled(later, 0, 0)])
