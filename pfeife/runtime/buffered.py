"""When messages have their memory: before they arrive, and until what was sent has arrived."""

from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
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
        self.inboxes: dict[int, _Inbox] = {}
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
        self.inboxes[source] = _Inbox(channel)
        self._post(source)

    def _post(self, source: int) -> None:
        for envelope in self.inboxes[source].due():
            self.waiting[source].append((*self._posted(source, envelope), envelope))

    def receive(self, source: int) -> Tensors:
        """The values of the oldest message of a rank, which is waited for."""
        arrived, works, envelope = self.waiting[source].popleft()
        self._wait(source, works)
        values = self._whole(source, arrived, envelope)
        self.inboxes[source].taken += 1
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
        for destination, leaving in self.leaving.items():
            while leaving:
                self._let_go(destination)
                self.finished[destination] += 1

    def _let_go(self, destination: int) -> None:
        """Of the oldest of what leaves, when that has been waited for."""
        works, pieces = self.leaving[destination].popleft()
        self._wait(destination, works)
        del pieces


class _Inbox:
    """How far a channel's messages have been taken, and how far their receives are posted."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.taken = self.posted = 0

    def due(self) -> Sequence[Envelope]:
        """Those whose receives are to be posted now."""
        start, self.posted = self.posted, self.channel.ahead[self.taken]
        return self.channel.envelopes[start : self.posted]
