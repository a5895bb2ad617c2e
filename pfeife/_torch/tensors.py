"""Tensors: those without storage, what looks at them, who shares them."""

import contextlib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

# A mode in which tensors have shapes and no storage, and what it raises where a value is asked for;
# there are no public names for them. If they move: torch.export uses them, and imports them.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)

# While no mode sees what is computed. If it moves: `torch._C._DisableTorchDispatch`.
from torch.utils._mode_utils import no_dispatch


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """While torch does not log, at every level with all of its frames, that an operation on fake
    tensors fails: who raises the error says so. If the logger moves: it does."""
    log = logging.getLogger(FakeTensorMode.__module__)

    def quiet(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("failed while attempting")

    log.addFilter(quiet)
    try:
        yield
    finally:
        log.removeFilter(quiet)


def fake_tensor(
    mode: FakeTensorMode,
    dtype: torch.dtype,
    device: torch.device,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> FakeTensor:
    """A tensor without storage, at a place in a storage of its own. If the constructor moves:
    `torch.empty_strided` in the mode, which is slower by a factor of ten."""
    with no_dispatch():
        if offset:
            last = offset + sum(s * (n - 1) for n, s in zip(shape, stride, strict=True))
            base = torch.empty(max(last + 1, 0), dtype=dtype, device="meta")
            like = base.as_strided(shape, stride, offset)
        else:
            like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(mode, like, device)


def fake_on(value: torch.Tensor, device: torch.device, mode: FakeTensorMode) -> FakeTensor:
    """A tensor like another one, without storage, on a device that need not be there."""
    if value.layout != torch.sparse_coo:
        shape, stride, offset = value.shape, value.stride(), value.storage_offset()
        return fake_tensor(mode, value.dtype, device, shape, stride, int(offset))
    parts = [fake_on(part, device, mode) for part in (value._indices(), value._values())]
    dims, kind = (value.sparse_dim(), value.dense_dim()), {"dtype": value.dtype, "device": device}
    constructor: Any = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default
    with mode, torch.no_grad():
        return constructor(*dims, value.shape, *parts, layout=value.layout, **kind)


def hooks_of(tensor: torch.Tensor) -> list[Any]:
    """Those who look at a tensor's gradients as they are made or added. torch has no public
    question for it; if these attributes move: nobody is warned."""
    several = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    return [hook for hooks in several for hook in (hooks or {}).values()]


def after_backward(function: Callable[[], None]) -> None:
    """Calls a function when the backward in which this is called is over, with all gradients where
    they go. torch has no public name for it; DDP and FSDP use this one."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor looks at a tensor's storage."""
    return views_of_memory(tensor) > 1


def views_of_memory(tensor: torch.Tensor) -> int:
    """How many tensors look at a tensor's storage, itself included. There is no public count of
    those; the one that is always there besides is the storage object that is asked."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1


def keeps_graph() -> bool:
    """Whether the backward that runs in this thread keeps what autograd has saved, for another one
    (`retain_graph=True`). AOTAutograd asks so for its donated buffers; if it moves: always true,
    which costs a copy of the gradients."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def is_handed_out(node: Any) -> bool:
    """Whether the backward that runs hands out what arrives at a leaf's node, and adds it nowhere
    (torch.autograd.grad). torch refuses to say whether it runs such a node; if it moves: nobody is
    told that this rank's gradients are not all."""
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True
    return False


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors in one storage may share bytes, by the span of each."""
    (first_start, first_end), (second_start, second_end) = (
        _span(tensor) for tensor in (first, second)
    )
    return first_start < second_end and second_start < first_end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    start = int(tensor.storage_offset())
    size = last + 1 if tensor.numel() else 0
    return start * tensor.itemsize, (start + size) * tensor.itemsize


def plainly() -> contextlib.AbstractContextManager[None]:
    """While classes of tensors do not look at what is done with them. If it moves:
    `torch._C.DisableTorchFunction`."""
    guard: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return guard


def storage_of(tensor: torch.Tensor) -> int | None:
    """What tells a tensor's storage from others that are there now, None without one."""
    if isinstance(tensor, FakeTensor) or not torch._C._has_storage(tensor):
        return None
    try:
        with plainly():
            return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # of functionalization, of wrappers
        return None


def is_in_backward() -> bool:
    """Whether the calling thread is in autograd's backward, as in a hook of a gradient. If the
    question moves: False, and optimizers that are stepped there count as stepped after it."""
    return torch._C._current_graph_task_id() != -1


def marked_dims(tensor: torch.Tensor) -> set[int]:
    """The dimensions that `torch._dynamo.mark_dynamic` marked on a tensor."""
    return set(getattr(tensor, "_dynamo_dynamic_indices", ()))


_MARKS = ("_dynamo_", "_has_dynamo_dim_marking", "_specialize_on")
_OPEN = ("dynamic", "weak_dynamic", "unbacked", "strict_unbacked")


def open_dims(tensor: torch.Tensor) -> set[int]:
    """The dimensions that `mark_dynamic`, `maybe_mark_dynamic` or `mark_unbacked` marked on a
    tensor."""
    return {dim for kind in _OPEN for dim in getattr(tensor, f"_dynamo_{kind}_indices", ())}


def mark_open(tensor: torch.Tensor, dims: Iterable[int]) -> None:
    """Marks dimensions of a tensor that may be dynamic."""
    torch._dynamo.maybe_mark_dynamic(tensor, sorted(dims))


@contextlib.contextmanager
def opened(tensors: Sequence[tuple[torch.Tensor, Collection[int]]]) -> Iterator[None]:
    """While dimensions of tensors are marked as in `mark_open`."""
    with contextlib.ExitStack() as stack:
        for tensor, dims in tensors:
            stack.enter_context(patch.dict(vars(tensor)))
            mark_open(tensor, dims)
        yield


def marked_most(tensor: torch.Tensor) -> dict[int, int]:
    """The largest sizes that `mark_dynamic(max=)` marked on a tensor, by the dimensions. Attributes
    as for `copy_marks`."""
    ranges = getattr(tensor, "_dynamo_dynamic_range", ())
    return {mark.dim: mark.max for mark in ranges if mark.max is not None}


def copy_marks(tensor: torch.Tensor, target: torch.Tensor) -> None:
    """Marks on a `target` the sizes as they are on a tensor by torch._dynamo's `mark_dynamic` and
    its like, which leave attributes; if these have other names, the marks are not seen. What is
    marked by `mark_unbacked` may be dynamic: a program plans with sizes, and such ones are
    unknown."""
    marks = ((name, mark) for name, mark in vars(tensor).items() if name.startswith(_MARKS))
    vars(target).update({name: mark for name, mark in marks if "unbacked" not in name})
    mark_open(target, open_dims(tensor) - open_dims(target))


def leaf_dims(in_dims: Any, tree: Any) -> list[int | None]:
    """`in_dims`, a prefix of the tree as in torch.vmap, as one entry a leaf.

    Raises ValueError if it is no prefix. torch.vmap itself uses this helper.
    """
    from torch.utils._pytree import _broadcast_to_and_flatten, tree_structure

    dims = _broadcast_to_and_flatten(in_dims, tree_structure(tree))
    if dims is None:
        raise ValueError(
            "in_dims does not fit the arguments of the step: it is a number, None, or a structure "
            "of them as that of the positional arguments (a tuple with an entry for each)"
        )
    return dims


def converting_others() -> contextlib.AbstractContextManager[Any]:
    """While `module.to(dtype)` and the like leave a module alone whose tensors are so already, as
    routers say in their forward: torch swaps fake tensors even then, and fails. All conversions go
    through this method; if it moves, such a step cannot be traced."""
    original = nn.Module._apply

    def applied(module: nn.Module, function: Callable[..., Any], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)
        values = [*module._parameters.values(), *module._buffers.values()]
        with torch.no_grad():
            # Where there is nothing to convert, `Tensor.to` gives the tensor itself.
            same = all(tensor is None or function(tensor) is tensor for tensor in values)
        return module if same else original(module, function, recurse=False)

    return patch.object(nn.Module, "_apply", applied)


def is_wrapper(value: Any) -> bool:
    """Whether a value is a tensor of a subclass that says which tensors it is made of. If it moves:
    none, so that such a tensor is taken for one with bytes of its own."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(value)


def asks_for_values(error: BaseException) -> bool:
    """Whether tensors without storage were asked for their values, or symbols were given where only
    numbers are taken. The classes have no public names; if they move: the error is said in torch's
    own words."""
    from torch._subclasses.fake_tensor import DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = (
        DataDependentOutputException,
        DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
    )
    takes_no_symbol = isinstance(error, TypeError) and re.search(r"\bSym(Int|Float)\b", str(error))
    # Of a plan's tensors, which are on the meta device: `item()`, and `nonzero()`.
    of_meta = isinstance(error, RuntimeError) and re.search(r"meta tensors|meta func", str(error))
    return isinstance(error, kinds) or bool(takes_no_symbol or of_meta)
