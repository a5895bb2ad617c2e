"""The factors of a reshape."""

import itertools
from collections.abc import Mapping, Sequence

import attrs

from pfeife import _torch
from pfeife.factors.equation import Dims, Equation, Label, NoRule, Operation

Sizes = Sequence[_torch.Size]


def reshaped(operation: Operation) -> Equation:
    """In row-major order a number stays where it is: both shapes are cut where either is.

        [4, 6]      ends after 6, 24 numbers        (a)(b c)
        [8, 3]      ends after 3, 24                (a b)(c)       a, b, c of 4, 2, 3
        [4, s, 6]   ends after 6, 6 s, 24 s         (a)(s)(b)      whatever the size s is
        [4 s, 6]    ends after 6, 24 s              (a s)(b)

    Between ends that both have, where one end does not divide the next, dimensions have nothing in
    common but the whole.
    """
    (before,), (after, *_) = operation.shapes, operation.results
    ends = [_ends(shape) for shape in (before, after)]
    if 0 in before or ends[0][-1:] != ends[1][-1:]:
        raise NoRule
    chain = _Chain()
    shared = [end for end in ends[0] if end in ends[1] and end != 1]
    for low, high in itertools.pairwise([1, *shared]):
        chain.extend(low, [_between(each, low, high) for each in ends])
    operands, results = (chain.dims(shape) for shape in (before, after))
    name = "size" if "size" in operation.arguments else "shape"
    whole = frozenset(chain.whole)
    return Equation(chain.sizes, (operands,), (results,), whole, (frozenset(),), shape=name)


def _ends(shape: Sizes) -> list[_torch.Size]:
    """After how many numbers, from the inside, dimensions end; each once."""
    ends = itertools.accumulate(reversed(shape), lambda a, b: _torch.expanded(a * b))
    return list(dict.fromkeys(ends))


def _between(ends: list[_torch.Size], low: _torch.Size, high: _torch.Size) -> list[_torch.Size]:
    """Those after one of them and up to another one."""
    first = ends.index(low) + 1 if low in ends else 0
    return ends[first : ends.index(high) + 1]


@attrs.frozen
class _Chain:
    """The ends of factors, from the inside, each of which divides the next. Those of dimensions
    that have nothing in common are `inside` of the next one."""

    ends: list[_torch.Size] = attrs.field(factory=lambda: [1])
    sizes: dict[Label, _torch.Size] = attrs.field(factory=dict)
    whole: set[_torch.Size] = attrs.field(factory=set)
    inside: dict[_torch.Size, _torch.Size] = attrs.field(factory=dict)

    def extend(self, low: _torch.Size, ends: Sequence[list[_torch.Size]]) -> None:
        """By the ends of two shapes after a common one and up to the next."""
        high = ends[0][-1]
        left = dict.fromkeys(end for each in ends for end in each)
        while left:
            smallest = [
                end for end in left if all(_torch.quotient(more, end) is not None for more in left)
            ]
            quotients = [_torch.quotient(end, self.ends[-1]) for end in smallest[:1]]
            if not quotients or quotients[0] is None:
                self._break(low, high, left)
                return
            self.sizes[smallest[0]] = quotients[0]
            self.ends.append(smallest[0])
            del left[smallest[0]]

    def _break(self, low: _torch.Size, high: _torch.Size, left: Mapping[_torch.Size, None]) -> None:
        """Takes all between two ends for one factor."""
        first = self.ends.index(low) + 1
        inner = [*self.ends[first:], *left]
        del self.ends[first:]
        for end in inner:
            self.sizes.pop(end, None)
            self.inside[end] = high
        size = _torch.quotient(high, low)
        if size is None:
            raise NoRule
        self.sizes[high] = size
        self.whole.add(high)
        self.ends.append(high)

    def dims(self, shape: Sizes) -> Dims:
        """The factors of each dimension; each is named by the end of it."""
        dims: list[tuple[Label, ...]] = []
        low: _torch.Size = 1
        for size in reversed(shape):
            high = _torch.expanded(low * size)
            if size != 1 and high in self.inside:
                dims.append((self.inside[high],))
            elif low == high:
                dims.append(())
            else:
                labels = self.ends[self.ends.index(low) + 1 : self.ends.index(high) + 1]
                dims.append((*reversed(labels),))
            low = high
        return tuple(reversed(dims))
