"""Quotients and products of sizes that are expressions of named ones.

They are sympy's, as torch's own are: it has no public name for what divides what.
"""

from collections.abc import Mapping, Sequence

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
    """Whether a number divides a size: an open one where it divides the named sizes that it divides
    in each of some calls, into parts of 2 or more, as torch takes 1 for a number; one that data
    decide nobody knows."""
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


def divisor_in(limit: sympy.Basic) -> dict[sympy.Symbol, int]:
    """A named size and a number, of a limit that says that this divides it; {} for others."""
    for told in limit.atoms(Mod):
        size, number = told.args
        if size.is_Symbol and limit == is_divided(size, number):
            return {size: int(number)}
    return {}


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


def is_divided(size: Size, number: int) -> sympy.Basic:
    """That a number divides a size, as an expression of the named sizes."""
    return sympy.Eq(Mod(sympy.sympify(size), number), 0)


def expanded(size: Size) -> Size:
    """A size in the one form that it has as a sum of products."""
    return size if isinstance(size, int) else sympy.expand(size)
