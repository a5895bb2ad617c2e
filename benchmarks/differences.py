"""The largest of some differences, where one may be NaN."""

import math
from collections.abc import Mapping, Sequence


def largest(differences: Sequence[float]) -> float:
    """NaN if one is, of which `max` and comparisons may say nothing; 0 if there are none."""
    return largest_of({str(at): each for at, each in enumerate(differences)})[0]


def largest_of(differences: Mapping[str, float]) -> tuple[float, str]:
    """The largest, and its name; NaN if one is."""
    if not differences:
        return 0.0, ""
    size = {n: math.inf if math.isnan(each) else each for n, each in differences.items()}
    where = max(size, key=lambda name: size[name])
    return differences[where], where
