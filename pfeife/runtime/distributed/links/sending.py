"""Messages that a thread sends while the rank computes."""

from concurrent.futures import Future
from datetime import timedelta
from typing import Any


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
