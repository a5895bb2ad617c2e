"""Quotients and products of sizes that are expressions of named ones.

They are sympy's, as torch's own are: it has no public name for what divides what.
"""

from collections.abc import Mapping, Sequence

import sympy  # type: ignore[import-untyped]
from torch.utils._sympy.functions import Mod

from pfeife._torch.sizes import Size, sizes_at


def quotient(size: Size, divisor: Size) -> Size | None:
    """How often one size is in another one, None unless that is a whole number whatever the named
    sizes are."""
    if isinstance(size, int) and isinstance(divisor, int):
        return None if size % divisor else size // divisor
    ratio = sympy.cancel(sympy.sympify(size) / divisor)
    if ratio.is_Integer:
        return int(ratio)
    whole = all(coefficient.is_Integer for coefficient in ratio.as_coefficients_dict().values())
    return ratio if ratio.is_polynomial() and whole else None


def divides(number: int, size: Size, calls: Sequence[Mapping[str, int]]) -> bool:
    """Whether a number divides a size: one that is open in each of some calls, by the named sizes
    there, into parts of 2 or more, as torch takes 1 for a number; one that data decide nobody
    knows."""
    if isinstance(size, int):
        return size % number == 0
    try:
        numbers = [sizes_at([size], named)[0] for named in calls]
    except ValueError:
        return False
    return bool(numbers) and all(n % number == 0 and n > number for n in numbers)


def is_divided(size: Size, number: int) -> sympy.Basic:
    """That a number divides a size, as an expression of the named sizes."""
    return sympy.Eq(Mod(sympy.sympify(size), number), 0)


def expanded(size: Size) -> Size:
    """A size in the one form that it has as a sum of products."""
    return size if isinstance(size, int) else sympy.expand(size)
