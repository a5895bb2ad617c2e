"""Which tensors lie in one memory."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch

from pfeife._torch import is_absent


def overlapping(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of different tensors that share bytes on one device, by their addresses; those without
    values have none.

    >>> flat = torch.zeros(4)
    >>> [len(list(overlapping(pair))) for pair in ([flat[:2], flat[2:]], [flat[:3], flat[2:]])]
    [0, 1]
    """
    spans = []
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        if tensor.numel() and not is_absent(tensor):
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in steps)
            start = tensor.data_ptr()
            end = start + (last + 1) * tensor.element_size()
            spans.append((str(tensor.device), start, end, tensor))
    spans.sort(key=lambda span: span[:3])
    for (device, _, end, left), (other_device, start, _, right) in pairwise(spans):
        if device == other_device and start < end:
            yield left, right
