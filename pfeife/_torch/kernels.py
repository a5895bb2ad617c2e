"""Which devices an operation has kernels for."""

import functools
import re
from typing import Any

import torch
from torch._ops import OpOverload

_CPU_ALONE = {"cpu", "mkldnn", "onednn", "quantized", "fbgemm", "xnnpack"}  # words in names


@functools.cache
def is_missing(operation: Any, kind: str) -> bool:
    """Whether an operation is known to have no kernel for a type of device ("cuda").

    The dispatcher says so where this build of torch has that type's kernels. Elsewhere it does for
    operations whose kernels are Python's: those of a library's CPU build may be there in another
    build, as torch's own are. For these the names tell, as far as they are the CPU's own. If the
    questions to the dispatcher move: names alone, and an operation of one device is noticed when
    it runs on another.
    """
    if not isinstance(operation, OpOverload):
        return False
    name = operation.name()  # such as "aten::add.Tensor"
    key = torch._C._dispatch_key_for_device(kind)
    has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    if _is_pythons(name) and not has_kernel(name, key):
        return True
    if has_kernel("aten::view", key):  # which is made of no other one
        # Some operations have a kernel for sparse tensors alone.
        keys = [key, f"Sparse{key}"] if kind in ("cpu", "cuda") else [key]
        return not any(has_kernel(name, dispatch_key) for dispatch_key in keys)
    return kind != "cpu" and not _CPU_ALONE.isdisjoint(re.split(r"[_:.]+", name))


def _is_pythons(name: str) -> bool:
    """Whether an operation has a CPU kernel that is registered by Python, as torch.library notes
    in a set. If it moves: no such operation is refused."""
    space, _, operation = name.partition("::")
    made: set[str] = getattr(torch.library, "_impls", set())
    return f"{space}/{operation}/CPU" in made


def lacks_device(error: Exception) -> bool:
    """Whether an operation has no value on a device only because this build of torch has not been
    linked with it. There is no class for that; if the words change: torch's own error is shown."""
    return isinstance(error, NotImplementedError) or "not linked with support for" in str(error)
