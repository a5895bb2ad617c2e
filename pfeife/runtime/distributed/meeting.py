"""Whether a rank's script has written by hand what that of a rank which asks for state has."""

import math
import time
from collections.abc import Callable, Sequence

from pfeife.runtime.distributed.by_hand import ByHand
from pfeife.runtime.distributed.questions import Found, Question
from pfeife.runtime.distributed.script import Script
from pfeife.runtime.failure import Refusal

_COUNTED = 5.0  # seconds in which what is being written to must have been counted


class Meeting:
    """Whether this rank's script, which is at the place of a question, is at its point too:

        writes here    on rank `reader`, which asks
        1              1                              it is
        0              1                              not yet, for `patience` seconds
        1              0                              it is beyond: Refusal

    If the reader has written by `.data`, which nobody counts, this rank must have done so as well,
    or write nothing now. `find` gives what answers the question.
    """

    def __init__(
        self,
        question: Question,
        reader: int,
        find: Callable[[Question], Found],
        by_hand: ByHand,
        script: Script,
        patience: float,
    ) -> None:
        self.question, self.reader, self.find = question, reader, find
        self.by_hand, self.script, self.patience = by_hand, script, patience
        self.late = self.noticed = math.inf

    def __call__(self) -> bool:
        """Raises Refusal if that will not be, or has not been for too long."""
        if self.question.optimizer is not None:  # what is written to its state is compared later
            return True
        now = time.monotonic()
        self.late = min(self.late, now + self.patience)
        found = self.find(self.question)
        by_data = self.by_hand.by_data(found.tensors)
        if by_data and not self.question.by_data:
            self._await_count(by_data, now)
            return False
        self.noticed = math.inf
        counts = self.by_hand.counts(found.tensors)
        stays = not self.question.by_data or bool(by_data) or self.script.stays
        if counts == self.question.written and stays:
            return True
        self._check_counts([name for name, _ in found.named], counts, now)
        return False

    def _await_count(self, name: str, now: float) -> None:
        """Values come before their count: another thread may be writing just now."""
        self.noticed = min(self.noticed, now)
        if now >= self.noticed + _COUNTED:
            raise Refusal(f"{name} was written to by its .data, which nobody counts")

    def _check_counts(self, names: Sequence[str], counts: Sequence[int], now: float) -> None:
        over = self.script.rests or now >= self.late
        for name, mine, theirs in zip(names, counts, self.question.written, strict=True):
            if mine > theirs or (mine < theirs and over):
                raise Refusal(
                    f"{name} was written to by hand {mine} times since the last change that "
                    f"all make, and on rank {self.reader}, which asks, {theirs} times"
                )
        if now >= self.late:
            raise Refusal(f"rank {self.reader} has written to parameters by their .data")
