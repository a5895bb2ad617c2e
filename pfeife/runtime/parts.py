"""Which parts of a step have run, so that nobody reads results that are not there."""

import contextlib
from collections.abc import Iterator


class Parts:
    """The forward and the backward of one step: each runs once, and results wait for them."""

    def __init__(self) -> None:
        self.done: set[str] = set()
        self.failed = ""

    @contextlib.contextmanager
    def running(self, forward: bool, backward: bool) -> Iterator[None]:
        """While parts run. Raises RuntimeError if they cannot: each runs once, in this order, and
        none after a failure."""
        wanted = {name for name, wish in (("forward", forward), ("backward", backward)) if wish}
        self._check_alive()
        again = self.done & wanted
        if again:
            raise RuntimeError(f"the {min(again)} of this step has run already: start another step")
        if wanted == {"backward"} and not self.done:
            raise RuntimeError("the backward of this step is to run before its forward")
        try:
            yield
        except BaseException as error:
            self.failed = f"{type(error).__name__}: {error}"
            raise
        self.done |= wanted

    def check(self) -> None:
        """Raises RuntimeError if there are no results, and says why not."""
        self._check_alive()
        if not self.done:
            raise RuntimeError("this step has not run: it has no results yet")

    def _check_alive(self) -> None:
        if self.failed:
            raise RuntimeError(f"this step has failed and has no results: {self.failed}")
