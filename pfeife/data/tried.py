"""What a search has looked at."""

from collections.abc import Callable

import attrs

from pfeife.data import checks


@attrs.frozen
class Tried:
    """A schedule that a search has timed, for so many stages.

    `after` is when, in seconds since the search began; `source` what gave it ("given": a family or
    a caller, "rule", "pattern", "annealed"); `step` its seconds, and `best` the least so far.
    """

    after: float = attrs.field(validator=checks.seconds)
    source: str
    stages: int = attrs.field(validator=checks.not_negative)
    step: float = attrs.field(validator=checks.seconds)
    best: float = attrs.field(validator=checks.seconds)


Watched = Callable[[Tried], object]
