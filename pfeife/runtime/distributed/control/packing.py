"""Tensors of any shapes and dtypes as one message of bytes, each where its dtype may start."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from pfeife.lowering.telling import aligned
from pfeife.runtime.distributed.control.questions import as_bytes


def room(sizes: Iterable[int]) -> int:
    """The bytes of a message of tensors of so many bytes."""
    return sum(aligned(size) for size in sizes)


def empty(tensors: Sequence[torch.Tensor], device: torch.device | str = "cpu") -> torch.Tensor:
    """Room for the message of such tensors, on a device."""
    return torch.empty(room(tensor.nbytes for tensor in tensors), dtype=torch.uint8, device=device)


def pack(tensors: Sequence[torch.Tensor], device: torch.device | str = "cpu") -> torch.Tensor:
    """The values of tensors as one message, on a device."""
    message = empty(tensors, device)
    at = 0
    for tensor in tensors:
        message[at : at + tensor.nbytes] = as_bytes(tensor.detach().to(device).contiguous())
        at += aligned(tensor.nbytes)
    return message


def views(message: torch.Tensor, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The values of a message of such tensors, in its memory."""
    at = 0
    for tensor in tensors:
        yield message[at : at + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
        at += aligned(tensor.nbytes)


def unpack(message: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Writes the values of a message to tensors."""
    with torch.no_grad():
        for tensor, dense in zip(tensors, views(message, tensors), strict=True):
            tensor.copy_(dense)
