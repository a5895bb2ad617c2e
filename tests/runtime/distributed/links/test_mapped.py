"""Memory that other processes map: here both are this one."""

import gc
import os

import pytest
import torch

from pfeife.runtime.distributed.links import mapped


def test_what_is_written_to_a_block_is_there():
    blocks = mapped.Blocks()
    mine = blocks.make(100)
    others = mapped.found(blocks.told())
    other = others.block(*blocks.places[mine.data_ptr()], 100)
    assert other.data_ptr() != mine.data_ptr()
    other.copy_(torch.arange(100))
    assert mine.tolist() == list(range(100))


def test_nothing_stays_of_a_block_that_nobody_has():
    first = len(os.listdir("/proc/self/fd"))
    blocks, before = mapped.Blocks(), len(os.listdir("/proc/self/fd"))
    others = mapped.found(blocks.told())
    kept, gone = blocks.make(100), blocks.make(100)
    for one in (kept, gone):
        others.block(*blocks.places[one.data_ptr()], 100)
    del gone, one
    gc.collect()
    assert len(blocks.places) == 2 and len(os.listdir("/proc/self/fd")) == before + 1
    others.forget_unused()
    others.block(*blocks.places[kept.data_ptr()], 100)
    others.forget_unused()
    assert len(others.known) == 1
    del kept
    blocks.close()  # somebody may have a world that has failed for long
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == first and not blocks.places


def test_the_pattern_is_not_drawn_from_a_generator_of_the_user():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    patterns = [mapped.Blocks().pattern.tolist() for _ in range(2)]
    assert torch.equal(before, torch.get_rng_state()) and patterns[0] != patterns[1]


def test_memory_of_another_is_not_taken_for_what_was_told():
    blocks = mapped.Blocks()
    told = blocks.told()
    assert mapped.found(mapped.empty_told()) is None
    told[2] = (told[2] + 1) % 256
    assert mapped.found(told) is None
    place = blocks.places[blocks.pattern.data_ptr()]
    with pytest.raises(RuntimeError, match="is not the memory of 100 bytes"):
        mapped.Others(os.getpid()).block(*place, 100)
    assert os.fstat(place[1]).st_size == 16
    with pytest.raises(RuntimeError, match="has gone"):
        mapped.Others(os.getpid()).block(1, 10**6, 100)
