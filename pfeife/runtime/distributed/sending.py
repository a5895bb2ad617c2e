"""Messages that a thread sends while the rank computes: Gloo copies them in the caller's time."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch

from pfeife.runtime.distributed.connection import Connection


class Sending:
    """A message on its way, to be waited for like torch.distributed's own work."""

    def __init__(self, sent: Future[Any]):
        self.sent = sent

    def wait(self, *patience: timedelta) -> None:
        """Until it has been sent. Raises RuntimeError if that fails or takes too long."""
        try:
            work = self.sent.result(*(limit.total_seconds() for limit in patience))
        except TimeoutError as error:
            raise RuntimeError("the thread that sends has not come to it") from error
        work.wait(*patience)


class Sender:
    """A rank's thread for large messages, which go in the order in which they were given."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "pfeife sender")  # started with the first message

    def send(
        self, connection: Connection, pieces: Sequence[torch.Tensor], peer: int
    ) -> list[Sending]:
        """Sends to a rank of the connection, as its group counts; returns at once."""
        return [
            Sending(self.thread.submit(connection.group.send, [piece], peer, 0)) for piece in pieces
        ]

    def close(self) -> None:
        """Takes nothing more; the thread ends when what it has is sent or has failed."""
        self.thread.shutdown(wait=False)
