"""Which sizes of a call a trace leaves open."""

import torch

from pfeife.frontend.batch import Cutter
from pfeife.frontend.trace.open_sizes import open_places


def call(*shapes):
    return Cutter(lambda *tensors: None, None, 1)(tuple(map(torch.ones, shapes)), {})


def test_sizes_that_were_others_before_are_open():
    """Those that were alike in all calls are one; 1 is none."""
    now = call((4, 7), (4, 7), (4, 1))
    before = [((4, 5), (4, 5), (4, 2))]
    assert open_places(now, before, None) == {(0, 1): "size_0", (1, 1): "size_0"}
    apart = [((4, 5), (4, 6), (4, 1))]
    assert open_places(now, apart, None) == {(0, 1): "size_0", (1, 1): "size_1"}


def test_dynamic_says_so():
    now = call((4, 7), (4, 1))
    assert open_places(now, [], None) == open_places(now, [((4, 5), (4, 1))], False) == {}
    assert set(open_places(now, [], True)) == {(0, 0), (0, 1), (1, 0)}
