"""Long work shows itself: a bar a phase on a terminal, a line a phase in the log."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import attrs

Progress = Callable[[int, int], None]  # how many are done, of how many


@attrs.frozen
class Shown:
    """Where phases are shown.

    Bars go to `terminal`, None for nowhere; a phase of less than `after` seconds leaves nothing
    there, and a bar is drawn anew every `every` seconds. The log has a line for every phase that
    ended well, at `level`, with `who` in front.
    """

    log: logging.Logger
    level: int = logging.INFO
    who: str = ""
    terminal: TextIO | None = None
    after: float = 1.0
    every: float = 0.1

    @contextmanager
    def phase(self, label: str) -> Iterator["Phase"]:
        """Shows the work of a `with` block. If that raises, its last state stays to be seen."""
        line = (
            ProgressLine(f"pfeife: {label}", self.terminal, self.every) if self.terminal else None
        )
        phase = Phase(line)
        start = time.monotonic()
        try:
            yield phase
        except BaseException:
            if line:
                line.end()
            raise
        seconds = time.monotonic() - start
        if line:
            line.end(f"{seconds:.1f} s" if seconds >= self.after else None)
        if self.log.isEnabledFor(self.level):
            outcome = f": {phase.outcome()}" if phase.outcome else ""
            self.log.log(self.level, "%s%s, %.2f s%s", self.who, label, seconds, outcome)


def shown(
    log: logging.Logger = logging.getLogger("pfeife"),  # noqa: B008
    *,
    progress: bool = True,
    rank: int = 0,
) -> Shown:
    """Bars on standard error if there shall be `progress`, this is rank 0 and a terminal sees it.

    The log's lines are of the level INFO on rank 0, and DEBUG on the others, which do the same.
    """
    if rank:
        return Shown(log, logging.DEBUG, f"rank {rank}: ")
    stream = sys.stderr
    seen = progress and stream is not None and stream.isatty()
    return Shown(log, terminal=stream if seen else None)


class Phase:
    """A phase while it runs.

    `progress` takes (done, total) for its bar; it is None where no bar is seen. `outcome` may be
    set to what says in words what came out; it is asked only if the log wants to know.
    """

    def __init__(self, line: "ProgressLine | None"):
        self.progress: Progress | None = line.progress if line else None
        self.outcome: Callable[[], str] | None = None


class ProgressLine:
    """One line of a terminal, drawn again over itself."""

    def __init__(self, label: str, to: TextIO, every: float, width: int = 30):
        self.label, self.to, self.every, self.width = label, to, every, width
        self.state, self.drawn = "...", 0
        self.last = time.monotonic()
        self._draw(f"{label} {self.state}")

    def progress(self, done: int, total: int) -> None:
        """A bar with so much filled."""
        now = time.monotonic()
        # Some work reports far more often than a terminal can draw.
        if now - self.last < self.every and done < total:
            return
        filled = self.width * min(done, total) // max(total, 1)
        state = f"[{'#' * filled}{'.' * (self.width - filled)}] {done}/{total}"
        if state != self.state:
            self.state, self.last = state, now
            self._draw(f"{self.label} {state}")

    def end(self, note: str | None = "failed") -> None:
        """Leaves the line with a note behind it; without one, no trace of it."""
        if note is None:
            self._draw("")
            self.to.write("\r")
        else:
            self._draw(f"{self.label} {self.state} {note}")
            self.to.write("\n")
        self.to.flush()

    def _draw(self, text: str) -> None:
        self.to.write("\r" + text.ljust(self.drawn))
        self.to.flush()
        self.drawn = len(text)
