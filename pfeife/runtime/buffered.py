"""When messages have their memory: before they arrive, and until what was sent has arrived."""

from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from pfeife.lowering.channel import Channel
from pfeife.lowering.envelope import Envelope, Tensors


class Buffered(ABC):
    """The part of a transport that says which buffers live when; one for each step.

        expect    the first receives of a channel are posted (see `posted_ahead`)
        receive   the oldest of them is waited for; those that are due now are posted
        send      what leaves is kept, with the works that send it
        release   the oldest of what leaves is waited for, and let go

    Works are what can be waited for.
    """

    def __init__(self) -> None:
        self.due: dict[int, Iterator[Sequence[Envelope]]] = {}  # what is to be posted next
        self.waiting: defaultdict[int, deque[tuple[Tensors, Sequence[Any], Envelope]]]
        self.waiting = defaultdict(deque)
        self.leaving: defaultdict[int, deque[tuple[Sequence[Any], Sequence[Any]]]]
        self.leaving = defaultdict(deque)
        self.finished: Counter[int] = Counter()

    @abstractmethod
    def _posted(self, source: int, envelope: Envelope) -> tuple[Tensors, Sequence[Any]]:
        """Memory for a message that will arrive, and the works that fill it."""

    @abstractmethod
    def _sent(
        self, destination: int, values: Tensors, envelope: Envelope
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """The works that send a message, and its pieces, which must live as long."""

    @abstractmethod
    def _wait(self, peer: int, works: Sequence[Any]) -> None:
        """Until they are done."""

    def _whole(self, source: int, arrived: Tensors, envelope: Envelope) -> Tensors:
        """All values of a message, of which what was posted has arrived."""
        return arrived

    def expect(self, source: int, channel: Channel) -> None:
        """Takes down what a rank will send, and posts the first receives."""
        self.due[source] = _due(channel)
        self._post(source)

    def _post(self, source: int) -> None:
        for envelope in next(self.due[source]):
            self.waiting[source].append((*self._posted(source, envelope), envelope))

    def receive(self, source: int) -> Tensors:
        """The values of the oldest message of a rank, which is waited for."""
        arrived, works, envelope = self.waiting[source].popleft()
        self._wait(source, works)
        # What is next is posted last: sizes that data decide come with this message.
        values = self._whole(source, arrived, envelope)
        self._post(source)
        return values

    def send(self, destination: int, values: Tensors, envelope: Envelope) -> None:
        """Begins to send a message, and keeps its pieces until they are let go of."""
        self.leaving[destination].append(self._sent(destination, values, envelope))

    def release(self, destination: int, count: int) -> None:
        """Lets go of the oldest `count` messages to a rank."""
        # Gloo's sends say that they are completed only when they have been waited for, so it
        # matters to know without asking when that takes no time.
        finished = min(count, self.finished[destination])
        self.finished[destination] -= finished
        for _ in range(count - finished):
            self._let_go(destination)

    def finish(self) -> None:
        """Waits until all that this step has sent has arrived."""
        # A failure of the last messages belongs to this step, and not to the next one.
        for destination, leaving in self.leaving.items():
            while leaving:
                self._let_go(destination)
                self.finished[destination] += 1

    def _let_go(self, destination: int) -> None:
        """Of the oldest of what leaves, when that has been waited for."""
        works, pieces = self.leaving[destination].popleft()
        self._wait(destination, works)
        del pieces


def _due(channel: Channel) -> Iterator[Sequence[Envelope]]:
    """The messages of a channel whose receives are posted when 0, 1, 2, ... have been taken."""
    for start, end in pairwise((0, *channel.ahead)):
        yield channel.envelopes[start:end]
