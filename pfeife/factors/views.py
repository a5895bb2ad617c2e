"""The factors of a reshape."""

import itertools
import math
from collections.abc import Sequence

from pfeife.factors.equation import Dims, Equation, Label, NoRule, Operation


def reshaped(operation: Operation) -> Equation:
    """In row-major order a number stays where it is: both shapes are cut where either is.

        [4, 6]      ends after 6, 24 numbers        (a)(b c)
        [8, 3]      ends after 3, 24                (a b)(c)       a, b, c of 4, 2, 3

    Between ends that both have, where one end does not divide the next, dimensions have nothing in
    common but the whole.
    """
    (before,), (after, *_) = operation.shapes, operation.results
    if not math.prod(before):
        raise NoRule
    ends = [_ends(shape) for shape in (before, after)]
    sizes: dict[Label, int] = {}
    whole: set[Label] = set()
    shared = sorted({1, *ends[0]} & {1, *ends[1]})
    for low, high in itertools.pairwise(shared):
        inside = sorted({end for each in ends for end in each if low < end <= high})
        steps = [low, *inside]
        if all(b % a == 0 for a, b in itertools.pairwise(steps)):
            sizes |= {b: b // a for a, b in itertools.pairwise(steps)}
        else:
            whole.add(high)
            sizes[high] = high // low
    operands, results = (_dims(shape, sizes, whole, shared) for shape in (before, after))
    name = "size" if "size" in operation.arguments else "shape"
    return Equation(sizes, (operands,), (results,), frozenset(whole), (frozenset(),), shape=name)


def _ends(shape: Sequence[int]) -> list[int]:
    """After how many numbers, from the inside, dimensions end."""
    return list(itertools.accumulate(reversed(shape), lambda a, b: a * b))


def _dims(
    shape: Sequence[int], sizes: dict[Label, int], whole: set[Label], shared: Sequence[int]
) -> Dims:
    """The factors of each dimension; each is named by the end of it."""
    dims: list[tuple[Label, ...]] = []
    low = 1
    for size in reversed(shape):
        high = low * size
        inside = [end for end in sizes if low < int(end) <= high]  # type: ignore[call-overload]
        beyond = next((end for end in shared if end >= high), high)
        broken = [beyond] if beyond in whole and size != 1 else []
        dims.append(tuple(broken or sorted(inside, reverse=True)))  # type: ignore[type-var]
        low = high
    return tuple(reversed(dims))
