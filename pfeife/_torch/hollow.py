"""Tensors whose memory is not there: what a constructor makes while it is only recorded."""

from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload

from pfeife._torch.tensors import FakeTensor, FakeTensorMode, fake_tensor


def without_memory(mode: FakeTensorMode, tensor: torch.Tensor) -> FakeTensor:
    """A fake tensor with the layout of another one."""
    layout = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    return fake_tensor(mode, tensor.dtype, tensor.device, *layout)


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
