"""How a tensor is cut over the members of a group."""

import math
from collections.abc import Sequence

import attrs
import torch


@attrs.frozen
class Split:
    """An axis of `members` cuts a tensor along dimension `dim` into equal parts: of each of
    `before` blocks, a member has one of `members` pieces.

        before 1    a a b b c c        member 0 has a a
        before 2    a b c a b c        member 0 has a a, as of the heads in [rows x heads]
    """

    dim: int
    members: int
    before: int = 1

    def __str__(self) -> str:
        blocks = f" of each of {self.before} blocks" if self.before > 1 else ""
        return f"one of {self.members} parts{blocks} in dimension {self.dim}"

    def parts(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Every member's part of a whole tensor."""
        return [self.part(value, member) for member in range(self.members)]

    def part(self, value: torch.Tensor, member: int) -> torch.Tensor:
        """A member's part of a whole tensor."""
        blocks = value.unflatten(self.dim, (self.before, self.members, -1))
        piece = blocks.select(self.dim + 1, member)
        return piece.flatten(self.dim, self.dim + 1).contiguous()

    def stacked(self, value: torch.Tensor) -> torch.Tensor:
        """Every member's part of a whole tensor, [members, *part]: a view where the parts lie one
        behind the other already (`in_order`)."""
        blocks = value.unflatten(self.dim, (self.before, self.members, -1))
        parts = blocks.movedim(self.dim + 1, 0).flatten(self.dim + 1, self.dim + 2)
        return parts.contiguous()

    def scatter(self, value: torch.Tensor, parts: torch.Tensor) -> None:
        """Writes every member's part of a whole tensor, [members, *part]."""
        blocks = value.unflatten(self.dim, (self.before, self.members, -1))
        parts.unflatten(self.dim + 1, (self.before, -1)).copy_(blocks.movedim(self.dim + 1, 0))

    def gather(self, parts: torch.Tensor, value: torch.Tensor) -> None:
        """Writes a whole tensor, of every member's part, [members, *part]."""
        blocks = value.unflatten(self.dim, (self.before, self.members, -1))
        blocks.movedim(self.dim + 1, 0).copy_(parts.unflatten(self.dim + 1, (self.before, -1)))

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor of every member's part."""
        return self.joined(torch.stack([*parts]))

    def joined(self, stack: torch.Tensor) -> torch.Tensor:
        """The whole tensor of every member's part, [members, *part]; a view as `stacked` is."""
        blocks = stack.unflatten(self.dim + 1, (self.before, -1)).movedim(0, self.dim + 1)
        return blocks.flatten(self.dim, self.dim + 2).contiguous()

    def in_order(self, shape: Sequence[int]) -> bool:
        """Whether the parts of a contiguous tensor lie one behind the other."""
        return self.before * math.prod(shape[: self.dim]) == 1

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a whole tensor, of whose parts this is the shape."""
        return tuple(n * self.members if d == self.dim else n for d, n in enumerate(shape))

    def local(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the parts of a tensor of this shape."""
        return tuple(n // self.members if d == self.dim else n for d, n in enumerate(shape))
