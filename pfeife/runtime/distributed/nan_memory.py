"""Tensors full of NaN that take no memory: one piece of it behind all of their addresses.

    addresses   0 ........ 8 MiB ........ 16 MiB ... 20 MiB      one tensor
    memory      [ 8 MiB of NaN, which all such tensors share ]

Linux maps a file as often as one likes. A page that is written to becomes the tensor's own, so that
it can be used as any other: loaded into, clamped, copied.
"""

import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Sequence

import torch

CHUNK = 2**23  # bytes of the shared memory; a process may map some ten thousand of them
_NAN = 0xFF  # all bits set is a NaN in every floating type
_FIXED, _NO_RESERVE = 0x10, 0x4000  # of Linux, which Python's mmap does not name
_FAILED = ctypes.c_void_p(-1).value


def nan_like(like: torch.Tensor) -> torch.Tensor | None:
    """A tensor of NaN with the shape, strides and dtype of another one on the CPU; None where there
    cannot be one without memory: on other devices and systems, of integers."""
    if like.device.type != "cpu" or like.layout != torch.strided:
        return None
    return nan_of(like.shape, like.stride(), like.dtype)


def nan_of(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
    """The same on the CPU, by its layout."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return None
    last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    size = (last + 1) * dtype.itemsize if 0 not in shape else 0
    addresses = _mapped(size) if size else None
    if addresses is None:
        return None
    flat = torch.frombuffer(addresses, dtype=torch.uint8)[:size].view(dtype)
    return flat.as_strided(shape, strides)


def give_back() -> None:
    """Gives the system what has been freed in this process, where malloc keeps it for later."""
    trim = getattr(_system(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _mapped(size: int) -> ctypes.Array | None:
    """So many bytes or more, without memory; they are given back with the last that looks at
    them."""
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    system, file = _system(), _file()
    if system is None or file is None:
        return None
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    start = system.mmap(None, size, 0, anonymous, -1, 0)
    if start == _FAILED:
        return None
    found = (ctypes.c_ubyte * size).from_address(start)
    weakref.finalize(found, system.munmap, start, size).atexit = False
    mode, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _FIXED | _NO_RESERVE
    for offset in range(0, size, CHUNK):
        part = min(CHUNK, size - offset)
        if system.mmap(start + offset, part, mode, flags, file, 0) == _FAILED:
            return None
    return found


@functools.cache
def _system() -> ctypes.CDLL | None:
    """The system's own calls, None where they are not those of Linux."""
    if not hasattr(os, "memfd_create"):
        return None
    library = ctypes.CDLL(None)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_long)
    library.mmap.restype = pointer
    library.munmap.argtypes = (pointer, size)
    return library


@functools.cache
def _file() -> int | None:
    """The memory that all of them share, None if there is none."""
    try:
        file = os.memfd_create("pfeife")
        written = os.write(file, bytes([_NAN]) * CHUNK)
    except OSError:
        return None
    return file if written == CHUNK else None
