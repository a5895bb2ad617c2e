"""What a search has found so far: the best of every origin."""

from enum import Enum

import attrs

from pfeife.sched.search.job_shop import Orders
from pfeife.sched.search.pattern import Pattern
from pfeife.sched.search.rules import Rule

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
        self._found: dict[Origin, list[Candidate]] = {origin: [] for origin in Origin}

    def keep(self, candidate: Candidate) -> None:
        mine, close = self._found[candidate.origin], 1e-6 * candidate.seconds
        if all(abs(one.seconds - candidate.seconds) > close for one in mine):
            mine.append(candidate)
            mine.sort(key=lambda one: one.seconds)
            del mine[_MOST:]

    def of(self, *origins: Origin) -> list[Candidate]:
        """The best first; of all origins unless some are given."""
        found = [one for origin in origins or Origin for one in self._found[origin]]
        return sorted(found, key=lambda one: one.seconds)

    def varied(self, count: int) -> list[Candidate]:
        """The best of every origin first, then the best of all."""
        first = sorted(
            (found[0] for found in self._found.values() if found), key=lambda one: one.seconds
        )
        return [*first, *(one for one in self.of() if one not in first)][:count]
