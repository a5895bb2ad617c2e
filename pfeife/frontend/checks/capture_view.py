"""State as a step sees it while it is captured: in another dtype, or on another device.

    the caller's   weight, float32            an optimizer steps it, checkpoints have it
    captured       weight, bfloat16           absent: only its dtype and layout are looked at
    computed with  a copy in bfloat16         made once a step (`passes.master_weights`)

Captured so, the step is the one that it would be after `model.to(torch.bfloat16)`, buffers aside:
what it asks for a parameter's dtype, it is told.

State that lives on several devices is seen on one of them, for which the graph is captured:

    the caller's   0.weight on cuda:0, 1.weight on cuda:1     each with the stage that uses it
    captured       both on cuda:0, where the batch is
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from pfeife.frontend.arguments import Inputs
from pfeife.frontend.deferred.remote_batch import LayoutAlone, absent
from pfeife.frontend.watch.reachable_state import Places
from pfeife.ir.parts import Role


class _Shown(LayoutAlone):
    """Why state has no values while it is seen in another dtype, or on another device."""

    def refusal(self, what: str) -> ValueError:
        return ValueError(
            f"{what} reads state while the step is captured, where it is shown without values in "
            "another dtype (option param_dtype) or on another device (option devices): do that "
            "outside of the step, or leave out the option"
        )


@attrs.frozen(eq=False)
class _State:
    """What a step reaches, and the device on which it is captured."""

    tensors: Sequence[torch.Tensor]
    device: torch.device


class CaptureView:
    """The parameters of a step that have a wider floating type than `dtype` (None: none), and its
    state on other devices than the one of the capture, if `homes` is given: that says of a tensor
    that was moved which one this is. `devices` are those of the ranks."""

    def __init__(
        self,
        dtype: torch.dtype | None,
        homes: Callable[[torch.Tensor], torch.device | None] | None = None,
        devices: Sequence[str] = (),
    ):
        self.dtype, self.homes = dtype, homes
        self.types = {torch.device(name).type for name in devices}
        self.state: _State | None = None  # once it was looked
        self.stand_ins = WeakIdKeyDictionary()
        self.shown: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    def look(
        self, step: Callable[..., Any], arguments: Mapping[str, Any], batch: torch.device
    ) -> None:
        """Finds what a step reaches by itself, or in arguments; the first time alone. `batch` is
        the device of what is cut."""
        if (self.dtype is None and self.homes is None) or self.state is not None:
            return
        places = Places(step, arguments)
        values = [slot.get() for slot in places.slots]
        state = _once(value for value in values if isinstance(value, nn.Parameter))
        if self.homes is None:
            wider = [value for value in state if self._is_wider(value.dtype)]
            self.state = _State(wider, self.device)
            return
        for root in places.roots.values():
            state = _once((*state, *root.buffers()))
        self.state = _State(state, self._home(state, self.homes, batch))

    @property
    def device(self) -> torch.device:
        """That of the capture."""
        return self.state.device if self.state else torch.device("cpu")

    def _home(
        self,
        state: Sequence[torch.Tensor],
        homes: Callable[[torch.Tensor], torch.device | None],
        batch: torch.device,
    ) -> torch.device:
        """The device of the capture: that of an earlier one; that of all state, unless only the
        batch is on one of those that compute; else that of the batch."""
        # All captures of a step must be for one device, whatever has been moved since.
        earlier = next((home for tensor in state if (home := homes(tensor)) is not None), None)
        if earlier is not None:
            return earlier
        there = {tensor.device for tensor in state}
        alone = batch.type in self.types and not {device.type for device in there} & self.types
        return there.pop() if len(there) == 1 and not alone else batch

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """State that has been moved."""
        self.state = _State(_once((*self._tensors, *tensors)), self.device)

    @property
    def _tensors(self) -> Sequence[torch.Tensor]:
        return self.state.tensors if self.state else ()

    @property
    def is_apart(self) -> bool:
        """Whether some state is on another device than the one of the capture."""
        return self.homes is not None and any(t.device != self.device for t in self._tensors)

    def _is_wider(self, dtype: torch.dtype) -> bool:
        wide = self.dtype is not None and dtype.itemsize > self.dtype.itemsize
        return wide and dtype.is_floating_point

    def _seen(self, tensor: torch.Tensor) -> tuple[torch.dtype, torch.device]:
        """As what a tensor is seen."""
        wide = isinstance(tensor, nn.Parameter) and self._is_wider(tensor.dtype)
        dtype = self.dtype if wide and self.dtype is not None else tensor.dtype
        return dtype, tensor.device if self.homes is None else self.device

    @contextlib.contextmanager
    def seen(self, values: bool = False) -> Iterator[None]:
        """While state is seen so, or until it is `put_back`; with its `values`, or else nothing
        may read these."""
        assert not self.shown
        for tensor in self._tensors:
            dtype, device = self._seen(tensor)
            if (dtype, device) == (tensor.dtype, tensor.device):
                continue
            self.shown.append((tensor, tensor.data, tensor.grad if tensor.is_leaf else None))
            if tensor.is_leaf:
                tensor.grad = None  # of the other dtype, or elsewhere
            # Python reads a scalar as soon as it computes with it, so it has its value in any case.
            real = values or not tensor.dim()
            tensor.data = (
                tensor.data.to(device, dtype) if real else self._stand_in(tensor, dtype, device)
            )
        try:
            yield
        finally:
            self.put_back()

    def put_back(self) -> None:
        """State is what it was."""
        for tensor, data, gradient in self.shown:
            tensor.data = data
            if tensor.is_leaf:
                tensor.grad = gradient
        self.shown.clear()

    def _stand_in(
        self, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """What has the layout that a copy would have."""
        layout = tuple(tensor.shape), tensor.stride()
        stand_in = self.stand_ins.get(tensor)
        same = stand_in is not None and (stand_in.dtype, stand_in.device) == (dtype, device)
        if not same or (tuple(stand_in.shape), stand_in.stride()) != layout:
            like = torch.empty_strided(*layout, dtype=dtype, device="meta")
            stand_in = self.stand_ins[tensor] = absent(like, device, _Shown())
        return stand_in

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


def _once(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Each of some tensors once."""
    return list({id(tensor): tensor for tensor in tensors}.values())
