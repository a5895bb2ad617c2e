"""Tensors without values: every operation on one asks the tensor's own record what to do.

    t = without_values(like, record)     the shape, strides, dtype and device of another tensor
    t + 1                                record.operation(aten.add.Tensor, (t, 1), {})

Such a tensor has a dispatch key that no other tensor has, and one Python function is that key's
kernel for all operations. So nothing goes past it: not what C++ calls (torch.tensor, torch.func,
TorchScript, collectives), and not what looks for memory (numpy, DLPack, pickle), of which there is
none. Its class is torch.Tensor or nn.Parameter, as before. The record belongs to the storage, and
so to all views of it.
"""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from pfeife._torch.operations import makes_view
from pfeife._torch.tensors import plainly

# A key for tests of torch's dispatcher, which no tensor of torch's has. There is no public key to
# choose; if it goes: any other one without kernels.
_NAME = "TESTING_ONLY_GenericWrapper"
_KEYS = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_NAME))
_KEY = torch._C._dispatch_key_parse(_NAME)
# What C++ has no Python function for, or must make a new tensor by.
_NATIVE = ("set_data", "_has_compatible_shallow_copy_type", "detach", "detach_", "alias")

# By which torch copies a tensor deeply: `t.new_empty([]).set_(copy of its storage, ...)`. The
# record answers the former.
_DEEP_COPY = torch.ops.aten.set_.source_Storage_storage_offset


class Record(Protocol):
    """Why a tensor has no values, and what becomes of operations on it."""

    def operation(self, operation: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of one of aten's operations, none of those that only look from elsewhere at
        the memory of their argument."""

    def refusal(self, what: str) -> Exception:
        """What to raise where somebody wants values."""


def is_absent(value: Any) -> bool:
    """Whether something is a tensor without values."""
    return isinstance(value, torch.Tensor) and torch._C._dispatch_keys(value).has(_KEY)


def record_of(tensor: torch.Tensor) -> Any:
    """The record of a tensor without values."""
    with plainly():
        return tensor.untyped_storage().record  # type: ignore[attr-defined]


def without_values(like: torch.Tensor, device: torch.device, record: Record) -> torch.Tensor:
    """A tensor with the shape, strides and dtype of another one, which takes no memory."""
    _kernel()
    layout: Any = {"strides": like.stride(), "dtype": like.dtype, "device": device}
    # An instance of torch.Tensor itself, which then takes over what the subclass's wrapper has.
    tensor = torch.empty(0, dtype=like.dtype, device=device)
    with natively():
        # The constructor of subclasses has no public name. `data` takes all but the subclass.
        wrapper: Any = torch.Tensor._make_wrapper_subclass(
            _Wrapper, like.shape, _extra_dispatch_keys=_KEYS, **layout
        )
        tensor.data = wrapper
        torch._C._set_throw_on_mutable_data_ptr(tensor)
    storage: Any = tensor.untyped_storage()  # one object, as long as the memory would be there
    storage.__class__ = _Storage
    storage.record = record
    return tensor


def let_go(tensor: torch.Tensor, record: Record) -> None:
    """Makes an absent tensor of one that has values; its gradient and hooks stay as they are."""
    tensor.data = without_values(tensor, tensor.device, record)


def let_go_all(tensors: Sequence[torch.Tensor], record: Record) -> None:
    """Makes absent tensors of some that share memory, which go on to do so."""
    size = tensors[0].untyped_storage().nbytes()
    room = torch.empty(size, dtype=torch.uint8, device="meta")
    whole = without_values(room, tensors[0].device, record)
    for tensor in tensors:
        layout = tensor.size(), tensor.stride(), tensor.storage_offset()
        with natively(), torch.no_grad():
            # A storage may have bytes left over behind the last element of this type.
            numbers = whole[: size - size % tensor.itemsize].view(tensor.dtype)
            tensor.data = numbers.as_strided(*layout)


def as_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of torch's meta device with the layout of another one."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class _Wrapper(torch.Tensor):
    """What a tensor without memory is made as; none is left."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(func)


class _Storage(torch.UntypedStorage):
    """The storage of a tensor without values: what would read or make its bytes is refused."""

    record: Record

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self.record.refusal("what looks for its memory, as saving does,")

    tolist = clone = copy_ = resize_ = share_memory_ = data_ptr = _refuse
    cpu = cuda = to = _to = pin_memory = __getitem__ = __setitem__ = __reduce__ = _refuse
    _write_file = _share_fd_cpu_ = _share_filename_cpu_ = _share_cuda_ = _refuse

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.UntypedStorage:
        """Of the plain class, which torch asks for; `set_` makes it one of these."""
        size = torch.empty(self.nbytes(), dtype=torch.uint8, device="meta")
        storage: Any = without_values(size, self.device, self.record).untyped_storage()
        storage.__class__ = torch.UntypedStorage
        return storage


def natively() -> contextlib.AbstractContextManager[None]:
    """While tensors without values are as any others, for what looks at none of their values. If
    it moves: `torch._C._dispatch_tls_set_dispatch_key_excluded`."""
    guard: contextlib.AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(_KEYS)
    return guard


@functools.cache
def _kernel() -> Sequence[torch.library.Library]:
    """The key's kernel, for as long as the process lives: no other tensor has the key.

    aten's operations have it each, by name: torch does not find a fallback in Python while a
    TorchDispatchMode is active, such as FlopCounterMode, or one of AOTAutograd's. If the list of
    names moves: those of `dir(torch.ops.aten)`, which have been used so far."""
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    kernels: Any = aten.m  # `Library.impl` keeps as many bytes again of each of the 3,000
    every.fallback(_answered, _NAME)
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        if namespace == "aten":
            native = name.partition(".")[0] in _NATIVE
            own = torch.library.fallthrough_kernel if native else _ByName(name)
            kernels.impl(name, _NAME, own)
    return every, aten


class _ByName(str):
    """The kernel of one of aten's operations. torch makes the objects of operations when they are
    first asked for; most never are."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name, _, overload = self.partition(".")
        operation = getattr(getattr(torch.ops.aten, name), overload or "default")
        return _answered(operation, *args, **kwargs)


def _answered(operation: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Called by the dispatcher for every operation with such a tensor among its arguments."""
    if operation is torch.ops.aten.resolve_conj.default and not args[0].is_conj():
        # Asked by `numpy()` and `tolist()` before they look for memory.
        raise record_of(args[0]).refusal("what makes an array or a list of it")
    # These look at nothing by themselves: the operations that they are made of come back here.
    if _is_composite(operation):
        return operation.decompose(*args, **kwargs)
    if _looks(operation):
        with natively():
            return operation(*args, **kwargs)
    if operation is torch.ops.aten._local_scalar_dense.default and _dynamo_looks():
        return 0  # a hint for a symbol, which nobody guards unless the step asks for the number
    if operation is _DEEP_COPY:
        with natively():
            tensor = operation(*args, **kwargs)
        tensor.untyped_storage().__class__ = _Storage
        return tensor
    return first_record(args, kwargs).operation(operation, args, kwargs)


def first_record(args: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
    """That of the first tensor without values among some arguments."""
    leaves = pytree.tree_leaves((args, kwargs))
    return next(record_of(leaf) for leaf in leaves if is_absent(leaf))


def _dynamo_looks() -> bool:
    """Whether Dynamo looks at an input of what it traces, as it does at all tensors without
    dimensions; it does so where no mode sees it, unlike functions that the step has run while it is
    traced (`assume_constant_result`). If the context moves, such a step goes through the other
    door: no public question is about what Dynamo itself does."""
    unseen = torch._C._dispatch_tls_local_exclude_set().has(torch._C.DispatchKey.Python)
    return unseen and torch._guards.TracingContext.try_get() is not None


@functools.cache
def _is_composite(operation: OpOverload) -> bool:
    """Whether an operation is made of others, by which it is answered."""
    return operation._can_decompose() and torch._C._dispatch_has_kernel_for_dispatch_key(
        operation.name(), "CompositeImplicitAutograd"
    )


@functools.cache
def _looks(operation: OpOverload) -> bool:
    """Whether the result is a view of the argument. `as_strided` may show a value twice."""
    return makes_view(operation) and operation is not torch.ops.aten.as_strided.default
