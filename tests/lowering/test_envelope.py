"""Messages: what is packed together, what is copied, what is posted ahead."""

import pytest
import torch
from carried import tensors
from hypothesis import given
from hypothesis import strategies as st

from pfeife.lowering.channel import AHEAD, FEWEST, MOST, MOST_QUEUED, posted_ahead
from pfeife.lowering.envelope import PACKED, Envelope, Layout


@given(st.lists(tensors(), min_size=1, max_size=5))
def test_what_arrives_is_what_was_sent(values):
    envelope = Envelope(tuple(Layout.of(value) for value in values))
    sent = envelope.pack(tuple(values))
    arrived, buffers = envelope.empty(None)
    for piece, buffer in zip(sent, buffers, strict=True):
        assert piece.is_contiguous() and buffer.is_contiguous()
        assert (piece.shape, piece.dtype) == (buffer.shape, buffer.dtype)
        buffer.copy_(piece)  # what a backend does
    for value, copy, layout in zip(values, arrived, envelope.layouts, strict=True):
        assert torch.equal(value, copy) and copy.stride() == layout.strides
    small = [value for value in values if value.nbytes <= PACKED]
    assert len(sent) == bool(small) + len(values) - len(small)


def test_a_dense_value_is_sent_without_a_copy():
    for value in (torch.randn(3, 4), torch.randn(3, 4).t(), torch.arange(5)):
        (piece,) = Envelope((Layout.of(value),)).pack((value,))
        assert piece.data_ptr() == value.data_ptr()


@pytest.mark.parametrize("wrong", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64)])
@pytest.mark.parametrize("others", [0, 1])
def test_a_value_that_nobody_expects_is_not_sent(wrong, others):
    layout = Layout.of(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"torch.float32 \[2, 3\] was captured"):
        Envelope((layout,) * (1 + others)).pack((wrong,) * (1 + others))


@given(
    st.lists(st.sampled_from([0, 10, AHEAD // 20, AHEAD // 3, AHEAD, 3 * AHEAD]), max_size=60),
    st.sampled_from([FEWEST, 5, MOST_QUEUED, MOST]),
)
def test_receives_are_posted_in_time_and_within_the_budget(sizes, most):
    ahead = posted_ahead(sizes, most)
    assert len(ahead) == len(sizes) + 1 and ahead == sorted(ahead)
    for taken, posted in enumerate(ahead):
        assert min(taken + min(FEWEST, most), len(sizes)) <= posted <= min(taken + most, len(sizes))
        waiting = sizes[taken:posted]
        assert len(waiting) <= FEWEST or sum(waiting) <= AHEAD
