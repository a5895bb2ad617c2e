"""Quotients and products of sizes that are expressions of named ones.

They are sympy's, as torch's own are: it has no public name for what divides what.
"""

import sympy  # type: ignore[import-untyped]

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


def expanded(size: Size) -> Size:
    """A size in the one form that it has as a sum of products."""
    return size if isinstance(size, int) else sympy.expand(size)
