"""Receive buffers that are used again."""

from functools import partial

import torch

from pfeife.lowering.envelope import Layout
from pfeife.runtime.distributed.links.buffers import Buffers

LAYOUT = Layout.of(torch.zeros(4))


def test_a_buffer_is_used_again_when_nobody_looks_at_it():
    buffers = Buffers(None, partial(torch.empty, dtype=torch.uint8))
    kept, given_back = buffers.take(LAYOUT), buffers.take(LAYOUT)
    place = given_back.data_ptr()
    assert kept.data_ptr() != place
    del given_back
    assert buffers.take(LAYOUT).data_ptr() == place
    assert len(buffers.tensors) == 2


def test_what_is_in_use_is_left_to_its_users():
    buffers = Buffers(None, partial(torch.empty, dtype=torch.uint8))
    kept, given_back = buffers.take(LAYOUT).fill_(1), buffers.take(LAYOUT)
    place = given_back.data_ptr()
    del given_back
    buffers.forget_used()
    assert [one.data_ptr() for one in buffers.tensors] == [place]
    taken = [buffers.take(LAYOUT).fill_(2) for _ in range(3)]
    assert taken[0].data_ptr() == place and kept.tolist() == [1.0] * 4
