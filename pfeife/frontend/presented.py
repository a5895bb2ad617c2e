"""Parameters as a step sees them while it is captured: in another dtype than they have.

    the caller's   weight, float32            an optimizer steps it, checkpoints have it
    captured       weight, bfloat16           no memory: only its dtype and layout are looked at
    computed with  a copy in bfloat16         made once a step (`passes.master_weights`)

Captured so, the step is the one that it would be after `model.to(torch.bfloat16)`, buffers aside:
what it asks for a parameter's dtype, it is told.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from pfeife import _torch
from pfeife.frontend.arguments import Inputs
from pfeife.frontend.places import Places
from pfeife.ir.program import Role

_FIRST = 2 * _torch.FIRST  # where what has no memory is said to be; deferred models are before it


class Presented:
    """The parameters of a step that have a wider floating type than `dtype`, None for nothing."""

    def __init__(self, dtype: torch.dtype | None):
        self.dtype = dtype
        self.found: list[nn.Parameter] | None = None
        self.stand_ins = WeakIdKeyDictionary()
        self.shown: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor | None]] = []
        self.next = _FIRST

    def look(self, step: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        """Finds what a step reaches by itself, or in arguments; the first time alone."""
        if self.dtype is None or self.found is not None:
            return
        values = (slot.get() for slot in Places(step, arguments).slots)
        found = {id(one): one for one in values if isinstance(one, nn.Parameter)}
        self.found = [one for one in found.values() if self._is_wider(one.dtype)]

    def _is_wider(self, dtype: torch.dtype) -> bool:
        assert self.dtype is not None
        return dtype.is_floating_point and dtype.itemsize > self.dtype.itemsize

    @contextlib.contextmanager
    def seen(self, values: bool = False) -> Iterator[None]:
        """While parameters are seen so, or until they are `put_back`; with their `values`, or else
        nothing may read these."""
        assert not self.shown
        for one in self.found or ():
            self.shown.append((one, one.data, one.grad))
            one.grad = None  # of the other dtype
            one.data = one.data.to(self.dtype) if values or not one.dim() else self._stand_in(one)
        try:
            yield
        finally:
            self.put_back()

    def put_back(self) -> None:
        """Parameters are what they were."""
        for one, data, gradient in self.shown:
            one.data, one.grad = data, gradient
        self.shown = []

    def _stand_in(self, one: nn.Parameter) -> torch.Tensor:
        """What has the layout that a copy would have."""
        layout = tuple(one.shape), one.stride()
        known = self.stand_ins.get(one)
        if known is None or (tuple(known.shape), known.stride()) != layout:
            assert self.dtype is not None
            last = sum((n - 1) * step for n, step in zip(*layout, strict=True))
            size = (last + 1) * self.dtype.itemsize if one.numel() else 0
            storage = _torch.hollow(self.next, one.device, size)
            self.next += (size // 64 + 1) * 64
            empty = torch.empty(0, dtype=self.dtype, device=one.device)
            known = self.stand_ins[one] = empty.set_(storage, 0, *layout)
        return known

    def check(self, inputs: Inputs) -> None:
        """Raises ValueError for a parameter that a captured step reads and that was not found."""
        for argument in inputs.arguments if self.dtype is not None else ():
            if argument.role == Role.PARAMETER and self._is_wider(argument.example.dtype):
                raise ValueError(
                    f"option param_dtype: the parameter {argument.names[0]} was not there, or out "
                    "of reach, when the step was called first, and is still "
                    f"{argument.example.dtype}: compile the step anew once the model has all "
                    "its parameters, and let it find the model by a closure, a global or an "
                    "argument"
                )
