"""Tensors that messages may carry."""

import torch
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@st.composite
def tensors(draw) -> torch.Tensor:
    """Of any dtype and layout: transposed, with gaps, expanded, empty, above and below PACKED."""
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 300]), max_size=3))
    base = torch.arange(torch.Size([2, *shape]).numel()).view(2, *shape)
    value = base.to(draw(st.sampled_from(DTYPES)))[draw(st.integers(0, 1))]
    if value.dim() > 1 and draw(st.booleans()):
        value = value.transpose(0, -1)
    if value.dim() and draw(st.booleans()):
        value = value[::2]
    return value
