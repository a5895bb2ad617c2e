"""Messages: what is packed together, what is copied, what is posted ahead."""

import pytest
import torch
from carried import tensors
from hypothesis import given
from hypothesis import strategies as st

from pfeife.lowering.channel import AHEAD, FEWEST, MOST, MOST_QUEUED, Channel, posted_ahead
from pfeife.lowering.envelope import PACKED, Envelope, Layout, envelope_of


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


def most(value: torch.Tensor) -> torch.Tensor:
    """The same kind of value, as large as it can be."""
    return value.new_empty([size + 1 for size in value.shape])


def transferred(envelope: Envelope, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """What arrives of the values over a connection that keeps the order of what is sent."""
    sent = iter(envelope.pack(values))

    def bring(part: Envelope) -> tuple[torch.Tensor, ...]:
        arrived, buffers = part.empty(None)
        for buffer in buffers:
            piece = next(sent)
            assert (piece.shape, piece.dtype) == (buffer.shape, buffer.dtype)
            buffer.copy_(piece)
        return arrived

    found = envelope.whole(bring(envelope.opening), bring)
    assert next(sent, None) is None
    return found


@given(st.lists(tensors(), min_size=1, max_size=5), st.data())
def test_what_arrives_is_what_was_sent_where_data_decide_sizes(values, data):
    told = [i for i, one in enumerate(values) if one.dim() and data.draw(st.booleans())]
    known = [most(one) if i in told else one for i, one in enumerate(values)]
    envelope = envelope_of(known, told)
    found = transferred(envelope, tuple(values))
    for value, copy in zip(values, found, strict=True):
        assert torch.equal(value, copy) and copy.dtype == value.dtype
        assert copy.stride() == Layout.of(value).strides


def test_bytes_are_counted_by_the_most_that_a_size_can_be():
    rows, known = torch.zeros(PACKED, 4), torch.zeros(3)
    envelope = envelope_of([rows, known], [0])
    assert envelope.bytes == rows.nbytes + known.nbytes
    assert not envelope.kept(0)  # the next one has another size


@pytest.mark.parametrize("wrong", [torch.zeros(4), torch.zeros(4, 2).double()])
def test_another_kind_of_value_is_not_sent(wrong):
    envelope = envelope_of([torch.zeros(4, 2)], [0])
    with pytest.raises(ValueError, match="was captured"):
        envelope.check((wrong,))
    with pytest.raises(ValueError, match="was captured"):
        envelope.pack((wrong,))


@pytest.mark.parametrize("numbers", [[-1, 2, 2, 1], [3, 2, -2, 1]])
def test_numbers_that_are_no_sizes_are_refused(numbers):
    envelope = envelope_of([torch.zeros(4, 2)], [0])
    with pytest.raises(ValueError, match="have arrived"):
        envelope.whole((torch.tensor(numbers),), transferred)


@given(st.lists(st.booleans(), max_size=12))
def test_no_receive_is_posted_before_the_sizes_of_one_that_is_sent_before(told):
    """What follows a message of unknown sizes would take the place of its second part."""
    value = torch.zeros(4)
    channel = Channel(tuple(envelope_of([value], [0] if one else []) for one in told))
    for taken, posted in enumerate(channel.ahead):
        assert posted >= min(taken + 1, len(told))
        assert not any(told[taken : posted - 1])
