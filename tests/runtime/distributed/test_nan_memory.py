"""Tensors of NaN without memory."""

import copy
import gc
from pathlib import Path

import pytest
import torch

from pfeife.runtime.distributed.nan_memory import CHUNK, give_back, nan_like

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
FLOATS += [torch.float8_e4m3fn, torch.float8_e5m2]


def taken() -> int:
    """Bytes of this process's own memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_it_looks_like_the_other_one_and_is_nan(dtype):
    for like in (torch.empty(3, 5), torch.empty(7, 300).t(), torch.empty(())):
        value = nan_like(like.to(dtype))
        assert (value.shape, value.dtype) == (like.shape, dtype)
        assert value.stride() == like.stride()
        wide = torch.view_as_real(value) if value.is_complex() else value.float()
        assert wide.isnan().all()


def test_what_has_no_nan_or_no_elements_is_none():
    assert nan_like(torch.arange(3)) is None
    assert nan_like(torch.empty(0, 3)) is None
    assert nan_like(torch.empty(3, device="meta")) is None
    assert nan_like(torch.eye(3).to_sparse()) is None


def test_it_takes_no_memory_until_it_is_written_to():
    parameter = torch.nn.Parameter(torch.ones(5 * CHUNK // 8))  # no multiple of the chunk
    give_back()
    size, full = parameter.nbytes, taken()
    parameter.data = nan_like(parameter)
    give_back()
    assert taken() < full - 0.9 * size
    assert parameter.isnan().all() and copy.deepcopy(parameter).isnan().all()
    give_back()
    empty = taken()
    assert empty < full - 0.9 * size
    with torch.no_grad():
        parameter.copy_(torch.tensor(2.0))
    assert parameter.sum() == 2 * parameter.numel() and taken() > empty + 0.9 * size
    other = nan_like(parameter)
    assert other.isnan().all(), "what is written to one is seen in another"
    parameter.data = other
    give_back()
    assert taken() < full - 0.9 * size


def test_many_of_them_come_and_go():
    for _ in range(3):
        values = [nan_like(torch.empty(1000)) for _ in range(2000)]
        assert all(one.isnan().all() for one in values[::500])
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    del values
    gc.collect()
    assert len(Path("/proc/self/maps").read_text().splitlines()) < maps - 1500
