"""Memory that large values arrive in, one step after another."""

from collections.abc import Callable
from functools import cached_property

import attrs
import torch

from pfeife._torch import is_shared
from pfeife.lowering.envelope import Layout


@attrs.frozen(eq=False, slots=False)
class Buffers:
    """A rank's receive buffers: made when they are first needed, kept, and used again.

    What arrives is a view of a buffer. The buffer is free when it is the only one that looks at
    its storage, so neither a compiled stage that returns a part of its argument, nor a message
    that is passed on, nor a result that the user keeps can lose its contents. On CUDA, a receive
    waits for all that was queued before it was posted, and so for the last reader.
    """

    device: torch.device | None
    make: Callable[[int], torch.Tensor]  # gives a buffer of so many bytes
    scratch_bytes: int = 0
    by_size: dict[int, list[torch.Tensor]] = attrs.Factory(dict)  # in bytes

    def take(self, layout: Layout) -> torch.Tensor:
        """A value of a layout, with whatever contents."""
        buffers = self.by_size.setdefault(layout.bytes, [])
        free = next((buffer for buffer in buffers if not is_shared(buffer)), None)
        if free is None:
            free = self.make(layout.bytes)
            buffers.append(free)
        return layout.within(free, 0)

    @cached_property
    def scratch(self) -> torch.Tensor:
        """Bytes for whoever uses them one after another; there are none before somebody does."""
        return torch.empty(self.scratch_bytes, dtype=torch.uint8, device=self.device)

    def forget_used(self) -> None:
        """Leaves the buffers in use to those who use them."""
        # A result that the user keeps would hold its buffer as used in all later steps.
        for size, buffers in self.by_size.items():
            self.by_size[size] = [buffer for buffer in buffers if not is_shared(buffer)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All buffers that it keeps, in use or not."""
        scratch = [self.scratch] if "scratch" in vars(self) else []
        return [*scratch, *(buffer for buffers in self.by_size.values() for buffer in buffers)]
