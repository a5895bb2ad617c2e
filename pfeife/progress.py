"""A bar for work that takes more than a moment."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

Progress = Callable[[int, int], None]


def bar(label: str, *, after: float = 1.0, to: TextIO | None = None, width: int = 30) -> Progress:
    """A function of (done, total) that draws a bar, begun `after` seconds after the first call.

    It goes to standard error unless `to` says otherwise, and nowhere if that is no terminal.
    """
    begun: list[float] = []
    drawn = [False]

    def progress(done: int, total: int) -> None:
        stream = to or sys.stderr
        if not begun:
            begun.append(time.monotonic())
        early = time.monotonic() - begun[0] < after
        if not stream.isatty() or (early and not drawn[0]):
            return
        drawn[0] = True
        filled = width * done // total
        text = f"\r{label} [{'#' * filled}{'.' * (width - filled)}] {done}/{total}"
        stream.write(text + ("\n" if done == total else ""))
        stream.flush()

    return progress
