"""Which phases of a step have run, so that nobody reads results that are not there."""

import contextlib
from collections.abc import Iterator


class PhaseGuard:
    """The forward and the backward phase of one step: each runs once, and results wait for them.

    `divided` says whether the schedule has all forwards before all backwards, on every rank.
    """

    def __init__(self, divided: bool) -> None:
        self.divided = divided
        self.done: set[str] = set()
        self.failed = ""

    @contextlib.contextmanager
    def running(self, forward: bool, backward: bool) -> Iterator[None]:
        """While phases run. Raises RuntimeError if they cannot: each runs once, in this order, and
        none after a failure; ValueError if the schedule has no phases."""
        wanted = {
            name for name, is_wanted in (("forward", forward), ("backward", backward)) if is_wanted
        }
        self._check_alive()
        if len(wanted) == 1 and not self.divided:
            raise ValueError(
                f"the {min(wanted)} cannot be run alone: the schedule has forwards after "
                "backwards. Use one that fills and drains, such as gpipe, or run both at once"
            )
        # Activations are dropped when they were last used: nothing can run on them again.
        again = self.done & wanted
        if again:
            raise RuntimeError(f"the {min(again)} of this step has run already: start another step")
        if wanted == {"backward"} and not self.done:
            raise RuntimeError("the backward of this step is to run before its forward")
        try:
            yield
        # Also Ctrl-C: half of a step has no results.
        except BaseException as error:
            self.failed = f"{type(error).__name__}: {error}"
            raise
        self.done.update(wanted)

    def check(self) -> None:
        """Raises RuntimeError if there are no results, and says why not."""
        self._check_alive()
        if not self.done:
            raise RuntimeError("this step has not run: it has no results yet")

    def _check_alive(self) -> None:
        if self.failed:
            raise RuntimeError(f"this step has failed and has no results: {self.failed}")
