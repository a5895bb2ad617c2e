"""How long a search may go on: operations that it looks at, and the clock."""

import math
import time
from collections.abc import Callable

import attrs

# Operations that a second looks at (about two thirds of what one 2020s core does in Python).
WORK_PER_SECOND = 8_000_000


@attrs.define(eq=False)
class Budget:
    """`work` operations to look at, of which some are `spent`, until the `deadline` by the
    monotonic clock. `interrupted` says that the clock came first: another run may find something
    else. `pace` is how many seconds an operation has taken lately. `tick` is called often, and
    `seen` with every schedule that is timed: what gave it, its stages and its seconds."""

    work: int
    deadline: float = math.inf
    tick: Callable[[], None] = lambda: None
    spent: int = 0
    interrupted: bool = False
    pace: float = 1 / WORK_PER_SECOND
    whole: "Budget | None" = None  # of which this is a part
    seen: Callable[[str, int, float], None] | None = None

    @staticmethod
    def of(
        seconds: float | None, work: int | None, tick: Callable[[], None] = lambda: None
    ) -> "Budget":
        """So many operations, or what an ordinary core does in so many seconds; with `seconds` the
        clock ends it in any case. Raises ValueError for numbers that make no sense."""
        if seconds is None and work is None:
            raise ValueError("seconds and work are None: a search needs one of them")
        timed = isinstance(seconds, int | float)
        if seconds is not None and not (timed and 0 < seconds < math.inf):
            raise ValueError(f"seconds={seconds!r}: a search takes a finite time above 0")
        if work is not None and (type(work) is not int or work < 1):
            raise ValueError(f"work={work!r}: a search looks at a whole number of operations")
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        return Budget(work or int((seconds or 0.0) * WORK_PER_SECOND), deadline, tick)

    @property
    def left(self) -> int:
        """Operations that are not yet spent."""
        return self.work - self.spent

    @property
    def seconds_left(self) -> float:
        """Seconds to the deadline, endless without one."""
        return self.deadline - time.monotonic()

    def over(self, ahead: int = 0) -> bool:
        """Whether the clock leaves no time for so many more operations."""
        # Once over it stays over: who asks twice in a loop must not go on at the second time.
        self.tick()
        if self.deadline < math.inf and self.seconds_left < ahead * self.pace:
            self.interrupted = True
        return self.interrupted

    def part(self, share: float) -> "Budget":
        """A share of what is left, of work and of seconds; what it spends is spent here too."""
        deadline = self.deadline
        if deadline < math.inf:
            deadline = time.monotonic() + share * self.seconds_left
        work = max(1, int(share * self.left))
        return Budget(work, deadline, self.tick, pace=self.pace, whole=self, seen=self.seen)

    def spend(self, work: int, start: float | None = None) -> None:
        """Counts operations, and takes the pace from when they started."""
        self.spent += work
        if self.whole is not None:
            self.whole.spend(work, start)
        if start is not None and work:
            # Not below half of what is usual: one quick call must not make `over` leave too little
            # time.
            self.pace = max((time.monotonic() - start) / work, 0.5 / WORK_PER_SECOND)
