"""Messages with values whose sizes data decide: the sizes travel first.

values       x [8, 4]   found [n, 2]   hidden [n, 4]      n is 3 in this microbatch
first        x, and the numbers 3 2 2 1  3 4 4 1          sizes and strides of the others
then         found, hidden                                into memory of that size
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import attrs
import torch

from pfeife.lowering.envelope import Envelope, Layout, Tensors


@attrs.frozen(slots=False)
class Announced(Envelope):
    """A message in which data decide the sizes of the values at the indices `told`; their layouts
    have the most that these can be, by which bytes are counted."""

    told: tuple[int, ...]

    @cached_property
    def opening(self) -> Envelope:
        """The values of known sizes, and the numbers of the others."""
        return Envelope((*self._others(self.layouts), _numbers(self._layouts)))

    @property
    def _layouts(self) -> tuple[Layout, ...]:
        return tuple(self.layouts[index] for index in self.told)

    def _others(self, values: tuple) -> tuple:
        return tuple(value for index, value in enumerate(values) if index not in self.told)

    def kept(self, index: int) -> bool:
        return index not in self.told and super().kept(index)

    def check(self, values: Tensors) -> None:
        for index, (value, layout) in enumerate(zip(values, self.layouts, strict=True)):
            (layout.check_kind if index in self.told else layout.check)(value)

    def pack(self, values: Tensors) -> list[torch.Tensor]:
        self.check(values)
        told = tuple(values[index] for index in self.told)
        layouts = tuple(map(Layout.of, told))
        numbers = [number for one in layouts for number in (*one.shape, *one.strides)]
        header = torch.tensor(numbers, device=told[0].device)
        first = self.opening.pack((*self._others(values), header))
        return [*first, *Envelope(layouts).pack(told)]

    def whole(self, arrived: Tensors, bring: Callable[[Envelope], Tensors]) -> Tensors:
        known, told = iter(arrived), iter(bring(self._rest(arrived[-1])))
        return tuple(next(told if i in self.told else known) for i in range(len(self.layouts)))

    def _rest(self, header: torch.Tensor) -> Envelope:
        """What travels after the opening. Raises ValueError for numbers that are no sizes."""
        numbers, layouts = iter(header.tolist()), []
        for one in self._layouts:
            shape, strides = ([next(numbers) for _ in one.shape] for _ in range(2))
            if min(shape) < 0 or min(strides) < 0:
                raise ValueError(f"a size of {shape} and strides of {strides} have arrived")
            layouts.append(Layout(tuple(shape), tuple(strides), one.dtype).dense())
        return Envelope(tuple(layouts))


def envelope_of(values: Sequence[torch.Tensor], told: Sequence[int] = ()) -> Envelope:
    """How values travel that are laid out like these, of which data decide the sizes of those
    `told`."""
    return envelope_with(tuple(map(Layout.of, values)), told)


def envelope_with(layouts: tuple[Layout, ...], told: Sequence[int] = ()) -> Envelope:
    """How values of such layouts travel, of which data decide the sizes of those `told`."""
    return Announced(layouts, tuple(told)) if told else Envelope(layouts)


def _numbers(layouts: Sequence[Layout]) -> Layout:
    return Layout((2 * sum(len(one.shape) for one in layouts),), (1,), torch.int64)
