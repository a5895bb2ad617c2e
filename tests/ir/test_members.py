"""What members of a group tell one another: parts of a tensor, and the whole that they are of."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pfeife.ir.members import MEANING, all_gather, scratch
from pfeife.ir.split import Split


@given(st.data())
def test_parts_that_are_joined_are_the_whole(data):
    """In memory as they come from an operation: in the order of the dimensions, also where these
    have one element."""
    members, before = data.draw(st.sampled_from([2, 3, 4])), data.draw(st.sampled_from([1, 2, 3]))
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    split = Split(data.draw(st.integers(0, len(shape) - 1)), members, before)
    shape[split.dim] *= members * before
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    parts, stack = split.parts(whole), split.stacked(whole)
    assert all(torch.equal(part, row) for part, row in zip(parts, stack, strict=True))
    for joined in (split.join(parts), split.joined(stack)):
        assert torch.equal(joined, whole) and joined.is_contiguous()
    # A view of the whole, and the whole a view of its parts, where nothing has to be copied.
    is_view = split.in_order(shape)
    assert (stack.data_ptr() == whole.data_ptr()) >= is_view
    assert (split.joined(stack).data_ptr() == stack.data_ptr()) >= is_view


@pytest.mark.parametrize("members", [2, 4])
def test_a_gathered_tensor_is_as_contiguous_as_on_one_device(members):
    """cuDNN and oneDNN take nothing else, as of a weight norm's g of [n, 1, 1]."""
    parts = [torch.ones(3, 1, 1)] * members
    for dim in range(3):
        (whole, *_) = MEANING[all_gather](parts, dim, 1, members)
        assert whole.is_contiguous()
        under_way, most = scratch(all_gather, parts[0], dim, 1, members)
        assert 0 <= under_way <= most
