"""What ranks ask one another for, and what they answer: JSON, and the tensors behind it."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from pfeife._torch import is_absent, is_wrapper
from pfeife.data import values
from pfeife.frontend.watch.gc_objects import heirs
from pfeife.runtime.distributed.control.script_point import Point
from pfeife.runtime.failure import CollectiveError

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@attrs.frozen
class Named:
    """An optimizer as all ranks know it: its class, the numbers of the tensors of each group (-1
    for one that no rank trains), and which one of those it is, by the order of first steps."""

    kind: str
    groups: tuple[tuple[int, ...], ...]
    place: int


@attrs.frozen
class Question:
    """What a rank asks for at a point of its script: the values of tensors, by their numbers, or an
    `optimizer`'s state for these; or, `passing`, only to be told when the other one has asked as
    often as this one, or has gone on. `tag` is that of the answer's messages, to `reader`. Since
    their last change the script has written to the tensors by hand as often as `written` says.
    """

    reader: int
    tag: int
    point: Point
    tensors: tuple[int, ...] = ()
    optimizer: Named | None = None
    written: tuple[int, ...] = ()
    passing: bool = False


@attrs.frozen
class Shaped:
    """A tensor that follows the answer, as dense bytes."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def empty(self, device: str = "cpu") -> torch.Tensor:
        """Room for it. Raises ValueError for what is no dtype or shape."""
        if self.dtype not in _DTYPES or min(self.shape, default=0) < 0:
            raise ValueError(f"{self.dtype}{list(self.shape)} is no kind of tensor")
        return torch.empty(self.shape, dtype=_DTYPES[self.dtype], device=device)

    def laid_out(self, dense: torch.Tensor) -> torch.Tensor:
        """The tensor with the strides that it had, if no two of its values share memory there."""
        # Strides matter for the bits of what is computed of it later, as on one device.
        strided = torch.empty_strided(self.shape, self.stride, dtype=dense.dtype)
        return strided.copy_(dense) if strided.untyped_storage().nbytes() == dense.nbytes else dense


@attrs.frozen
class Answer:
    """Why there is none, or how many tensors follow; `states` are those of the tensors that were
    asked for, `encoded`, None where the optimizer has none."""

    refused: str = ""
    tensors: tuple[Shaped, ...] = ()
    states: tuple[str | None, ...] = ()


@attrs.frozen
class StateEntry:
    """What answers a question: tensors with names, and an optimizer's states that are made of
    them."""

    tensors: tuple[torch.Tensor, ...] = ()
    names: tuple[str, ...] = ()
    states: tuple[str | None, ...] = ()

    def check_here(self) -> None:
        """Raises CollectiveError for a tensor that has lost its values."""
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if is_absent(tensor):
                raise CollectiveError(
                    f"{name} has no values there any more, since the script has written to it what "
                    "another rank trains"
                )

    def copied(self) -> "StateEntry":
        """With copies on the CPU."""
        copies = (copied(tensor) for tensor in self.tensors)
        return attrs.evolve(self, tensors=(*copies,))


def shaped(tensor: torch.Tensor) -> Shaped:
    """What is told of a tensor. Raises CollectiveError for one that is not dense, or made of
    others."""
    if is_wrapper(tensor):
        raise CollectiveError(
            f"a {type(tensor).__name__}, made of other tensors, is not sent to other ranks"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CollectiveError(
            f"a tensor with the layout {tensor.layout} is not sent to other ranks"
        )
    return Shaped(str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()))


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU that autograd knows nothing of."""
    return tensor.detach().to("cpu", copy=True)


def encoded_text(text: str) -> bytes:
    """As it travels: half a surrogate pair, as names of files may have, is spelled out."""
    return text.encode("utf-8", "backslashreplace")


def text_bytes(text: str) -> torch.Tensor:
    """A text as a tensor of bytes."""
    data = bytearray(encoded_text(text))
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def text_of(data: torch.Tensor) -> str:
    """The text of such bytes."""
    return bytes(data.tolist()).decode()


def as_bytes(dense: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, in its own memory."""
    return dense.reshape(-1).view(torch.uint8)


def encoded(value: Any, tensors: list[torch.Tensor]) -> str:
    """A value, such as an optimizer's state, as text; its tensors are added to a list, and those
    that a tensor of a subclass is made of (see `torch.utils._python_dispatch`), as those of 8-bit
    optimizers. Raises CollectiveError for what is not sent."""

    def leaf(part: Any) -> Any:
        if is_wrapper(part):
            return {"made of": values.to_data(_taken_apart(part), leaf)}
        if isinstance(part, torch.Tensor):
            tensors.append(part)
            return {"Tensor": len(tensors) - 1}
        if isinstance(part, torch.Size):
            return {"Size": [*part]}
        if isinstance(part, torch.dtype):
            return {"dtype": str(part)}
        if isinstance(part, dict) and all(isinstance(key, str) for key in part):
            return values.to_data({**part}, leaf)
        raise CollectiveError(
            f"it has a {type(part).__name__}: only tensors, numbers, texts, and lists, tuples "
            "and dicts of these are sent to other ranks and saved"
        )

    return values.to_text(value, leaf)


def decoded(text: str, tensors: Sequence[torch.Tensor]) -> Any:
    """The value that was `encoded`. Raises ValueError for another text, and for a subclass of
    tensors that this process has not."""

    def wrapper(data: Any) -> torch.Tensor:
        name, parts, context, shape, stride = values.from_data(data, leaves)
        return _wrappers()[name].__tensor_unflatten__(parts, context, shape, stride)

    leaves: dict[str, Callable[[Any], Any]] = {
        "Tensor": tensors.__getitem__,
        "Size": torch.Size,
        "dtype": _DTYPES.__getitem__,
        "made of": wrapper,
    }
    return values.from_text(text, leaves)


def _taken_apart(tensor: Any) -> list[Any]:
    """The class of a tensor that is made of others, these by name, and what else it is made by."""
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    return [_name_of(type(tensor)), parts, context, tensor.shape, (*tensor.stride(),)]


def _wrappers() -> dict[str, Any]:
    """The classes of this process whose tensors are made of others, by name."""
    kinds = heirs([torch.Tensor])
    return {_name_of(kind): kind for kind in kinds if hasattr(kind, "__tensor_unflatten__")}


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
