"""What a script says: to the log, as warnings, on a terminal."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Of building a step, as bars and the log name them.
PHASES = ["capturing", "fusing", "measuring", "planning", "building", "first step"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Lines(logging.Handler):
    """A log handler that keeps what it is given."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def said() -> Iterator[list[str]]:
    """What is logged or warned meanwhile; logged only on rank 0."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    log = logging.getLogger("pfeife")
    log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield found
        found += [str(one.message) for one in warned if "microbatches count" in str(one.message)]
    finally:
        log.removeHandler(handler)
