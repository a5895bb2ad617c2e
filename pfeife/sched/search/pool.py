"""What a search has found so far: the best of every origin."""

import math
from enum import Enum

import attrs

from pfeife.sched.search.job_shop import Orders
from pfeife.sched.search.list_schedule import Rule
from pfeife.sched.search.pattern import Pattern

_MOST = 8  # of one origin


class Origin(Enum):
    """Where orders come from."""

    GIVEN = "given"  # a family's, or the caller's
    RULE = "rule"
    PATTERN = "pattern"
    ANNEALED = "annealed"


@attrs.frozen(eq=False)
class Candidate:
    """Orders and their seconds, with the rule or pattern that gave them."""

    seconds: float
    orders: Orders
    origin: Origin
    rule: Rule | None = None
    pattern: Pattern | None = None


class Pool:
    """The best candidates, apart by origin, so that many rules of nearly the same length do not
    drive out the only pattern; of one length one each."""

    def __init__(self) -> None:
        self._by_origin: dict[Origin, list[Candidate]] = {origin: [] for origin in Origin}

    @property
    def best(self) -> float:
        """Seconds of the shortest candidate, endless without any."""
        # Asked for before every schedule that a search tries, so nothing is sorted.
        firsts = (candidates[0] for candidates in self._by_origin.values() if candidates)
        return min((candidate.seconds for candidate in firsts), default=math.inf)

    def keep(self, candidate: Candidate) -> None:
        """Takes a candidate in, unless its origin has one of the same length, or enough that are
        better."""
        candidates, close = self._by_origin[candidate.origin], 1e-6 * candidate.seconds
        if all(abs(rival.seconds - candidate.seconds) > close for rival in candidates):
            candidates.append(candidate)
            candidates.sort(key=lambda rival: rival.seconds)
            del candidates[_MOST:]

    def of(self, *origins: Origin) -> list[Candidate]:
        """The best first; of all origins unless some are given."""
        candidates = [
            candidate for origin in origins or Origin for candidate in self._by_origin[origin]
        ]
        return sorted(candidates, key=lambda candidate: candidate.seconds)

    def varied(self, count: int) -> list[Candidate]:
        """The best of every origin first, then the best of all."""
        first = sorted(
            (candidates[0] for candidates in self._by_origin.values() if candidates),
            key=lambda candidate: candidate.seconds,
        )
        return [*first, *(candidate for candidate in self.of() if candidate not in first)][:count]
