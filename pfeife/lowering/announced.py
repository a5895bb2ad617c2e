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
        # A buffer that is used again has one size, and those of announced values differ.
        return index not in self.told and super().kept(index)

    def check(self, values: Tensors) -> None:
        for index, (value, layout) in enumerate(zip(values, self.layouts, strict=True)):
            (layout.check_kind if index in self.told else layout.check)(value)

    def pack(self, values: Tensors) -> list[torch.Tensor]:
        self.check(values)
        announced = tuple(values[index] for index in self.told)
        layouts = tuple(map(Layout.of, announced))
        numbers = [number for layout in layouts for number in (*layout.shape, *layout.strides)]
        header = torch.tensor(numbers, device=announced[0].device)
        first = self.opening.pack((*self._others(values), header))
        return [*first, *Envelope(layouts).pack(announced)]

    def whole(self, arrived: Tensors, bring: Callable[[Envelope], Tensors]) -> Tensors:
        # the header came last, after the values of known sizes; both kinds keep their order
        opening, rest = iter(arrived), iter(bring(self._rest(arrived[-1])))
        return tuple(next(rest if i in self.told else opening) for i in range(len(self.layouts)))

    def _rest(self, header: torch.Tensor) -> Envelope:
        """What travels after the opening. Raises ValueError for numbers that are no sizes."""
        numbers, layouts = iter(header.tolist()), []
        for layout in self._layouts:
            shape, strides = ([next(numbers) for _ in layout.shape] for _ in range(2))
            if min(shape) < 0 or min(strides) < 0:
                raise ValueError(f"a size of {shape} and strides of {strides} have arrived")
            layouts.append(Layout(tuple(shape), tuple(strides), layout.dtype).dense())
        return Envelope(tuple(layouts))


def envelope_of(values: Sequence[torch.Tensor], announced: Sequence[int] = ()) -> Envelope:
    """How values travel that are laid out like these, of which data decide the sizes of those
    `announced`."""
    return envelope_with(tuple(map(Layout.of, values)), announced)


def envelope_with(layouts: tuple[Layout, ...], announced: Sequence[int] = ()) -> Envelope:
    """How values of such layouts travel, of which data decide the sizes of those `announced`."""
    return Announced(layouts, tuple(announced)) if announced else Envelope(layouts)


def _numbers(layouts: Sequence[Layout]) -> Layout:
    return Layout((2 * sum(len(layout.shape) for layout in layouts),), (1,), torch.int64)
