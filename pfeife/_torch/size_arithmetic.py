"""Quotients and products of sizes that are expressions of named ones.

They are sympy's, as torch's own are: it has no public name for what divides what.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.utils._sympy.functions import FloorDiv, Mod

from pfeife._torch.sizes import Size


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
    """Whether a number divides a size. It divides an open one if that follows of the named sizes
    that it divides in each of some calls, where these have parts of 2 or more: torch takes 1 for a
    number. Of one that data decide nobody knows."""
    if isinstance(size, int):
        return size % number == 0
    names = {str(symbol): symbol for symbol in size.free_symbols}
    if not calls or any(not names.keys() <= named.keys() for named in calls):
        return False
    divided = {
        symbol: number * symbol
        for name, symbol in names.items()
        if all(named[name] % number == 0 and named[name] > number for named in calls)
    }
    return quotient(expanded(size.xreplace(divided)), number) is not None


@functools.lru_cache(maxsize=2**8)
def divisors(limits: tuple[sympy.Basic, ...]) -> Mapping[sympy.Symbol, int]:
    """The numbers by which limits say that named sizes can be divided, by these."""
    pairs = [told.args for limit in limits for told in limit.atoms(Mod)]
    return {
        size: int(number)
        for size, number in pairs
        if size.is_Symbol and number.is_Integer and divisibility(number, size) in limits
    }


def without_remainders(size: Size, divided: Mapping[sympy.Symbol, int]) -> Size:
    """A size where numbers divide some named ones: 2 * (n // 2) is n."""
    if isinstance(size, int):
        return size
    quotients = {FloorDiv(name, number): name / number for name, number in divided.items()}
    remainders = size.atoms(FloorDiv)
    if not remainders or not remainders <= quotients.keys():
        return size
    exact = sympy.expand(size.xreplace(quotients))
    factors = exact.as_coefficients_dict().values()
    whole = exact.is_polynomial() and all(factor.is_Integer for factor in factors)
    return exact if whole else size


def divisibility(number: int, size: Size) -> sympy.Basic:
    """That a number divides a size, as an expression of the named sizes."""
    return sympy.Eq(Mod(sympy.sympify(size), number), 0)


def divided_by(number: int, sizes: Iterable[tuple[int, Size]]) -> tuple[sympy.Basic, ...]:
    """The limits that say, of pairs of a multiple of a number and a size, that the one divides the
    other: no more than need to be said."""
    pairs: dict[Any, None] = dict.fromkeys(pair for pair in sizes if not isinstance(pair[1], int))
    divided = {size: number * size for _, size in pairs if size.is_Symbol}
    rest = (
        pair for pair in pairs if quotient(expanded(pair[1].xreplace(divided)), pair[0]) is None
    )
    return (*(divisibility(number, name) for name in divided), *(divisibility(*p) for p in rest))


def expanded(size: Size) -> Size:
    """A size in the one form that it has as a sum of products."""
    return size if isinstance(size, int) else sympy.expand(size)
