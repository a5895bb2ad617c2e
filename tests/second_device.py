"""A second real device for a machine that has none: "second:0", whose memory is the CPU's.

    on_second_device()    for the whole process: torch has one such place, and one who registers it

It is torch's PrivateUse1, whose kernels are those of the CPU on the same addresses. Tensors come in
by DLPack, which says where they are. An operation on tensors of both devices fails, as on a GPU;
autograd has a thread for it, optimizers group by it. It has no streams, and is one device only
(torch's guard for devices that are made in Python counts one). That `p.data` may be of another
device is granted here, as torch grants it to CUDA.
"""

import ctypes
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "second"
CPU = torch.device("cpu")
_EXTENSION = 12  # DLPack's number of such a device
_CODES = {  # DLPack's of dtypes, with their bits
    **{torch.uint8: (1, 8), torch.int8: (0, 8), torch.int32: (0, 32), torch.int64: (0, 64)},
    **{torch.float16: (2, 16), torch.float32: (2, 32), torch.float64: (2, 64)},
    **{torch.bfloat16: (4, 16), torch.bool: (6, 8)},
}
_COPIES = (torch.ops.aten.copy_.default,)


class _Described(ctypes.Structure):
    """DLPack's DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("dims", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_held: list[Any] = []  # what tensors over there look at: as long as the process lives
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def _there(tensor: torch.Tensor, keep: Any = None) -> torch.Tensor:
    """A tensor of the second device over the memory of one of the CPU."""
    numbers = ctypes.c_int64 * max(tensor.dim(), 1)
    shape, strides = numbers(*tensor.shape), numbers(*tensor.stride())
    one = _Described(
        tensor.data_ptr() or 64,  # nobody reads it
        (_EXTENSION, 0),
        tensor.dim(),
        *_CODES[tensor.dtype],
        1,
        shape,
        strides,
        0,
        None,
        None,
    )
    _held.append((one, shape, strides, tensor, keep))
    return torch._C._from_dlpack(_capsule(ctypes.addressof(one), b"dltensor", None))


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the CPU over the memory of one of the second device."""
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    size = (sum((n - 1) * step for n, step in steps) + 1) * tensor.element_size()
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), CPU, size)
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())


def _kernel(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation: that of the CPU."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    kinds = {one.device.type for one in leaves if isinstance(one, torch.Tensor) and one.dim()}
    if len(kinds) > 1 and operation not in _COPIES:
        raise RuntimeError(f"{operation}: expected all tensors on one device, got {sorted(kinds)}")
    ours: list[tuple[torch.Tensor, torch.Tensor]] = []

    def lent(one: Any) -> Any:
        if isinstance(one, torch.Tensor) and one.device.type == NAME:
            ours.append((_here(one), one))
            return ours[-1][0]
        return CPU if isinstance(one, torch.device) else one

    given, named = pytree.tree_unflatten([lent(one) for one in leaves], tree)
    results = operation(*given, **named)

    def back(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        for inner, outer in ours:
            if inner is result:
                if outer.shape != inner.shape:  # an empty one that was given for the result
                    outer.data = _there(inner)
                return outer
            if inner.numel() and _storage(inner) == _storage(result):  # a view of it
                return _there(result, keep=outer)
        return _there(result)

    return pytree.tree_map(back, results)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Module:
    """What torch asks of a device."""

    def __init__(self) -> None:
        self.generator = torch.Generator()  # its kernels draw from that of the CPU

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def manual_seed_all(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def get_rng_state(self, device: Any = 0) -> torch.Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = 0) -> None:
        self.generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


_libraries: list[torch.library.Library] = []


def on_second_device() -> None:
    """Registers the device, once and for all in this process."""
    _setup_privateuseone_for_python_backend(NAME, _Module())
    anything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    anything.fallback(_kernel, "PrivateUse1")
    aten.impl("copy_", lambda *args: _kernel(torch.ops.aten.copy_.default, *args), "PrivateUse1")
    for key in ("AutogradCPU", "AutogradPrivateUse1"):
        aten.impl("_has_compatible_shallow_copy_type", lambda one, other: True, key)
    _libraries.extend((anything, aten))
