"""Operations: what each does with its arguments, by its schema, and for which devices there are
kernels."""

import functools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload


def has_no_rule(error: BaseException) -> bool:
    """Whether an operation has failed since nobody knows the shape of its result without values.
    The classes have no public names; if they move: the operation is refused in torch's words."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )

    kinds = (DataDependentOutputException, DynamicOutputShapeException)
    return isinstance(error, (*kinds, UnsupportedOperatorException, NotImplementedError))


def draws(operation: OpOverload) -> bool:
    """Whether an operation takes numbers from a generator."""
    return torch.Tag.nondeterministic_seeded in operation.tags


def changes_layout(operation: OpOverload) -> bool:
    """Whether an operation changes the layout of its argument in place."""
    return torch.Tag.inplace_view in operation.tags


def makes_view(operation: OpOverload) -> bool:
    """Whether all results of an operation lie in the memory of its arguments, which it leaves as
    it is. If schemas move: `torch.Tensor._base` of its results says so."""
    aliases = [result.alias_info for result in operation._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


# Arguments that batch norms write to, which not all of their schemas say.
_STATISTICS = ("running_mean", "running_var")


def written(operation: OpOverload, args: Any, kwargs: Any) -> Iterator[Any]:
    """The arguments that an operation writes to."""
    for at, argument in enumerate(operation._schema.arguments):
        by_schema = argument.alias_info is not None and argument.alias_info.is_write
        if by_schema or argument.name in _STATISTICS:
            if at < len(args) and not argument.kwarg_only:
                yield args[at]
            elif argument.name in kwargs:
                yield kwargs[argument.name]


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
