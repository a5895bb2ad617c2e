"""The attention kernel of a CPU, and those of CUDA that compute the same.

The operations of scaled_dot_product_attention have no public names; their arguments are read by the
names of their schemas. If one moves: `move_to_device` refuses attention, as it did before.
"""

from collections.abc import Mapping
from typing import Any

import torch

from pfeife._torch.sizes import is_unbacked

_ATEN = torch.ops.aten
ON_CPU: Any = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
ON_CPU_BACKWARD: Any = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
FLASH: Any = _ATEN._scaled_dot_product_flash_attention.default
EFFICIENT: Any = _ATEN._scaled_dot_product_efficient_attention.default
FLASH_BACKWARD: Any = _ATEN._scaled_dot_product_flash_attention_backward.default
EFFICIENT_BACKWARD: Any = _ATEN._scaled_dot_product_efficient_attention_backward.default

MASK_ALIGNMENT = 8  # of the strides of a mask (attention.cpp, preprocess_mask)
SEEDS = {FLASH: (6, 7), EFFICIENT: (2, 3)}  # where a result has the state of the draws
_HALVES = (torch.float16, torch.bfloat16)


def by_name(operation: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What an operation is given, defaults too, by the names of its schema."""
    arguments = operation._schema.arguments
    values = dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
    return {
        argument.name: values.get(argument.name, argument.default_value) for argument in arguments
    }


def in_order(operation: Any, named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by name as an operation takes them. Raises KeyError for one that it needs."""
    args, kwargs = [], {}
    for argument in operation._schema.arguments:
        has = argument.name in named or not argument.has_default_value()
        if argument.kwarg_only and has and named[argument.name] is not None:
            kwargs[argument.name] = named[argument.name]
        elif not argument.kwarg_only:
            args.append(named[argument.name] if has else argument.default_value)
    return tuple(args), kwargs


def cuda_kernel(arguments: Mapping[str, Any]) -> Any:
    """The operation of CUDA for what a CPU's is given, as values: torch's default order, flash
    before efficient attention, on compute capability 8.0 and above.

    Torch asks the driver; its rules are those of can_use_flash_attention and of
    can_use_mem_efficient_attention (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, 2.11 to
    2.15). Raises ValueError with what neither takes without padding.
    """
    query, key, value, mask = (arguments[name] for name in ("query", "key", "value", "attn_mask"))
    _check(arguments)
    width, kind = query.shape[-1], query.dtype
    # Flash attention would align a causal mask that is not square with the last key, not with the
    # first one: torch does not choose it there.
    square = query.shape[-2] == key.shape[-2] or not arguments["is_causal"]
    alike = query.shape[-1] == key.shape[-1] == value.shape[-1]
    if kind in _HALVES and mask is None and square and alike and width <= 256:
        if width % 8:
            raise ValueError(f"heads of {width} numbers, which CUDA pads to a multiple of 8")
        return FLASH
    each = 8 if kind in _HALVES else 4  # 16 bytes, to which the kernel's products are aligned
    if width % each or value.shape[-1] % each:
        raise ValueError(f"heads of {width} numbers in {kind}, which are no multiple of {each}")
    if not query.shape[1] == key.shape[1] == value.shape[1]:
        raise ValueError(f"{query.shape[1]} heads of queries and {key.shape[1]} of keys")
    if mask is not None and mask.dtype != kind:
        raise ValueError(f"a mask in {mask.dtype} of queries in {kind}")
    return EFFICIENT


def _check(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError for what no kernel of CUDA takes."""
    tensors = [arguments[name] for name in ("query", "key", "value", "attn_mask")]
    tensors = [tensor for tensor in tensors if tensor is not None]
    if any(_is_by_data(size) for tensor in tensors for size in tensor.shape):
        raise ValueError("a size that data decide")
    kind = arguments["query"].dtype
    if kind not in (*_HALVES, torch.float32):
        raise ValueError(f"queries in {kind}")
    if arguments["dropout_p"]:
        raise ValueError(f"dropout of {arguments['dropout_p']}")
    if arguments["is_causal"] and arguments["attn_mask"] is not None:
        raise ValueError("a mask beside is_causal")
    if any(tensor.stride(-1) != 1 for tensor in tensors):
        raise ValueError("numbers of a head, or of a mask's row, that are not side by side")
    if not all(size for tensor in tensors for size in tensor.shape):
        raise ValueError("a size of 0")


def _is_by_data(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and any(map(is_unbacked, size.node.expr.free_symbols))
