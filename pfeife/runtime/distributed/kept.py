"""What this rank lets go of while other ranks, a little behind in the script, ask for it."""

import weakref
from typing import Any


class Kept:
    """Models and optimizers that were there when all ranks last came together, which is when they
    agree on a call; until then a model that the script drops keeps its memory."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[Any]] = []
        self.held: list[Any] = []

    def add(self, one: Any) -> None:
        """Keeps something from now on."""
        self.seen.append(weakref.ref(one))
        self.held.append(one)

    def renew(self) -> None:
        """Lets go of what nobody else has any more; the ranks are at one place."""
        self.held = []
        found = [(one, ref) for ref in self.seen if (one := ref()) is not None]
        self.held, self.seen = [one for one, _ in found], [ref for _, ref in found]
