"""How values travel between ranks: their layout, and what is packed together.

The runtime, the account of memory and all that tells the time of a message go by this. Where data
decide the sizes of values, these travel first:

    values       x [8, 4]   rows [n, 2]   hidden [n, 4]       n is 3 in this microbatch
    opening      x, and the numbers 3 2 2 1  3 4 4 1          sizes and strides of the others
    then         rows, hidden                                 into memory of that size
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import attrs
import torch

from pfeife.data.link import Link, LinkKind
from pfeife.data.machine import Machine

PACKED = 2**17  # bytes up to which a value is copied into one piece with others of its message
APART = 2**20  # bytes from which a message is sent while the rank computes
_ALIGNED = 64  # bytes; no dtype is wider
_SENT_AS_IS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})

Tensors = tuple[torch.Tensor, ...]


@attrs.frozen(slots=False)
class Layout:
    """How a value lies in a message: dense, in the order of strides in which it was captured."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(value: torch.Tensor) -> "Layout":
        """How a value like this one lies in a message."""
        return Layout(tuple(value.shape), value.stride(), value.dtype).dense()

    def dense(self) -> "Layout":
        """The same values without gaps, in the same order."""
        # empty_like keeps the order of strides and leaves no gaps; nothing is allocated on meta
        meta = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
        # Twice: of strides with gaps torch may give a size of 1 a stride that it changes when it
        # makes the result dense again, as the other end of a message does.
        return attrs.evolve(self, strides=torch.empty_like(torch.empty_like(meta)).stride())

    @cached_property
    def bytes(self) -> int:
        """What a value takes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def large(self) -> bool:
        """Whether such a value travels by itself, into a buffer that is used again."""
        return self.bytes > PACKED

    @cached_property
    def as_is(self) -> bool:
        """Whether every backend sends such a tensor without being told that it is bytes."""
        meta = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
        return meta.is_contiguous() and self.dtype in _SENT_AS_IS

    def empty(self, device: torch.device | None) -> torch.Tensor:
        """New memory for such a value."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def flat(self, value: torch.Tensor) -> torch.Tensor:
        """The memory of a dense tensor, as what is sent."""
        if self.as_is:
            return value
        return value.as_strided((value.numel(),), (1,)).view(torch.uint8)

    def within(self, piece: torch.Tensor, offset: int) -> torch.Tensor:
        """The value that lies in a piece of bytes."""
        part = piece[offset : offset + self.bytes].view(self.dtype)
        return part.as_strided(self.shape, self.strides)

    def check(self, value: torch.Tensor) -> None:
        """Raises ValueError for a value that the receiver does not expect."""
        if value.shape != self.shape or value.dtype != self.dtype:
            raise self._unexpected(value)

    def check_kind(self, value: torch.Tensor) -> None:
        """Raises ValueError for a value that is another one than in its sizes."""
        if value.dtype != self.dtype or value.dim() != len(self.shape):
            raise self._unexpected(value)

    def _unexpected(self, value: torch.Tensor) -> ValueError:
        return ValueError(
            f"a value of {value.dtype} {list(value.shape)} is to be sent, but "
            f"{self.dtype} {list(self.shape)} was captured and is expected: an operation of "
            "the model gives other shapes than it gave when the step was captured"
        )


@attrs.frozen(slots=False)
class Envelope:
    """The values of one message, in the order in which both ends know them.

    They travel in `pieces`, a send each: those of up to `PACKED` bytes are copied into one, a
    larger one goes by itself, without a copy if it is dense. Data decide the sizes of the values at
    the indices `by_data`; their layouts have the most that these can be, by which bytes are
    counted.
    """

    layouts: tuple[Layout, ...]
    by_data: tuple[int, ...] = ()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each value."""
        return tuple(layout.bytes for layout in self.layouts)

    @cached_property
    def pieces(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the values that travel together, piece by piece."""
        return pieces_of(self.sizes)

    @cached_property
    def bytes(self) -> int:
        """What the buffers of all pieces take."""
        return sum(self.piece_bytes(piece) for piece in self.pieces)

    @cached_property
    def apart(self) -> frozenset[int]:
        """Which pieces are a value of at least `APART` bytes."""
        alone = [(at, piece) for at, piece in enumerate(self.pieces) if len(piece) == 1]
        return frozenset(at for at, piece in alone if self.piece_bytes(piece) >= APART)

    def kept(self, index: int) -> bool:
        """Whether a value arrives in a buffer that is used again: one that has one size."""
        return index not in self.by_data and self.layouts[index].large

    def piece_bytes(self, piece: tuple[int, ...]) -> int:
        """What the buffer of a piece takes."""
        return bytes_of(self.sizes, piece)

    @cached_property
    def opening(self) -> "Envelope":
        """What travels first: all, where the sizes are known; else the values of known sizes, and
        the numbers of the others."""
        if not self.by_data:
            return self
        count = 2 * sum(len(self.layouts[index].shape) for index in self.by_data)
        return Envelope((*self._known(self.layouts), Layout((count,), (1,), torch.int64)))

    def _known(self, values: tuple) -> tuple:
        return tuple(value for index, value in enumerate(values) if index not in self.by_data)

    def whole(self, arrived: Tensors, bring: "Callable[[Envelope], Tensors]") -> Tensors:
        """The values of the message, of which the opening has `arrived`; `bring` gets the rest."""
        if not self.by_data:
            return arrived
        # the header came last, after the values of known sizes; both kinds keep their order
        rest = bring(Envelope(tuple(self._told_by(arrived[-1]))))
        fixed, announced = iter(arrived), iter(rest)
        indices = range(len(self.layouts))
        return tuple(next(announced if index in self.by_data else fixed) for index in indices)

    def _told_by(self, header: torch.Tensor) -> Iterator[Layout]:
        """How what follows the opening is laid out. Raises ValueError for numbers that are no
        sizes: a peer may have sent them."""
        numbers = iter(header.tolist())
        for layout in (self.layouts[index] for index in self.by_data):
            shape, strides = ([next(numbers) for _ in layout.shape] for _ in range(2))
            if min(shape) < 0 or min(strides) < 0:
                raise ValueError(f"a size of {shape} and strides of {strides} have arrived")
            yield Layout(tuple(shape), tuple(strides), layout.dtype).dense()

    def check(self, values: Tensors) -> None:
        """Raises ValueError for values that the receiver does not expect."""
        for index, (value, layout) in enumerate(zip(values, self.layouts, strict=True)):
            (layout.check_kind if index in self.by_data else layout.check)(value)

    def pack(self, values: Tensors) -> list[torch.Tensor]:
        """What is sent of the values, a tensor a piece. Raises ValueError for other shapes."""
        self.check(values)
        if not self.by_data:
            return [self._packed(values, piece) for piece in self.pieces]
        announced = tuple(values[index] for index in self.by_data)
        layouts = tuple(map(Layout.of, announced))
        numbers = [number for layout in layouts for number in (*layout.shape, *layout.strides)]
        header = torch.tensor(numbers, device=announced[0].device)
        first = self.opening.pack((*self._known(values), header))
        return [*first, *Envelope(layouts).pack(announced)]

    def _packed(self, values: Tensors, piece: tuple[int, ...]) -> torch.Tensor:
        if len(piece) == 1:
            value, layout = values[piece[0]], self.layouts[piece[0]]
            # Dense as captured: what travels is the value's own memory, so nobody may write to it
            # yet.
            if value.stride() == layout.strides:
                return layout.flat(value)
            return layout.flat(layout.empty(value.device).copy_(value))
        packed = self._piece(piece, values[piece[0]].device)
        offset = 0
        for index in piece:
            layout = self.layouts[index]
            layout.within(packed, offset).copy_(values[index])
            offset += _aligned(layout.bytes)
        return packed

    def _piece(self, piece: tuple[int, ...], device: torch.device | None) -> torch.Tensor:
        return torch.empty(self.piece_bytes(piece), dtype=torch.uint8, device=device)

    def empty(
        self, device: torch.device | None, large: Callable[[Layout], torch.Tensor] | None = None
    ) -> tuple[Tensors, list[torch.Tensor]]:
        """The values that will arrive, and the buffers for their pieces in the same memory.

        `large` gives the large ones, which are new without it.
        """
        values: list[torch.Tensor | None] = [None] * len(self.layouts)
        buffers = []
        for piece in self.pieces:
            if len(piece) == 1:
                layout = self.layouts[piece[0]]
                value = large(layout) if large and self.kept(piece[0]) else layout.empty(device)
                values[piece[0]] = value
                buffers.append(layout.flat(value))
                continue
            buffers.append(self._piece(piece, device))
            offset = 0
            for index in piece:
                values[index] = self.layouts[index].within(buffers[-1], offset)
                offset += _aligned(self.layouts[index].bytes)
        return tuple(values), buffers  # type: ignore[arg-type]


def envelope_of(values: Sequence[torch.Tensor], by_data: Sequence[int] = ()) -> Envelope:
    """How values travel that are laid out like these, of which data decide the sizes of those at
    the indices `by_data`."""
    return Envelope(tuple(map(Layout.of, values)), tuple(by_data))


def pieces_of(sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Which values of a message (of so many bytes each) travel together, the packed ones first."""
    # both ends work this out by themselves, so it goes by nothing but the sizes
    small = tuple(i for i, size in enumerate(sizes) if size <= PACKED)
    alone = [(i,) for i, size in enumerate(sizes) if size > PACKED]
    return (*((small,) if small else ()), *alone)


def bytes_of(sizes: Sequence[int], piece: tuple[int, ...]) -> int:
    """What a piece of a message takes: several values start at aligned places."""
    return sizes[piece[0]] if len(piece) == 1 else sum(_aligned(sizes[index]) for index in piece)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


@attrs.frozen
class Travel:
    """Seconds of a message: from its send to its arrival, and what it takes of its ranks' time."""

    arriving: float
    sending: float
    receiving: float


def travel(sizes: Sequence[int], link: Link | LinkKind | Machine) -> Travel:
    """How long a message of values of so many bytes takes over a link, or that of a machine.

    A piece is handed over when the rank is done with the one before, and the last one's arrival
    counts; but a link carries no more bytes in its time than if they were one message.
    """
    sent = [bytes_of(sizes, piece) for piece in pieces_of(sizes)]
    before = sum(link.send_seconds(size) for size in sent[:-1])
    return Travel(
        max(before + link.transfer_seconds(sent[-1]), link.transfer_seconds(sum(sent))),
        before + link.send_seconds(sent[-1]),
        sum(link.receive_seconds(size) for size in sent),
    )
