"""What an operation of a graph is given, as JSON, and back: exactly, or not at all.

JSON                            value, beside those of `values`
{"node": "add_1"}               what a node of the graph computes
{"torch": "float32"}            a dtype, layout or memory format of torch's
{"device": "cpu"}               a device
{"operation": "aten.add.Tensor"}
{"value": [dtype, device, shape, stride, offset, asks for gradients]}    a fake tensor
{"size": ["Mul", 2, "x_size_0"]}    an expression of sizes, see `_torch.size_trees`
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from pfeife import _torch
from pfeife.data import plain, values
from pfeife.ir.nodes import size_tensor
from pfeife.ir.seeding import seeded

_ENUMS = (torch.dtype, torch.layout, torch.memory_format)
_OPERATION = re.compile(r"(aten|prims|pfeife)\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)", re.ASCII)
_NUMBERS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_"),
)
_OF_SIZES = ("sym_float", "sym_int", "sym_max", "sym_min", "sym_not", "sym_ite", "sym_sum")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "seeded": seeded,
    "size_tensor": size_tensor,
    **{name: getattr(torch, name) for name in _OF_SIZES},
    **{name: getattr(operator, name) for name in _NUMBERS},
}
_NAMES = {function: name for name, function in FUNCTIONS.items()}


def spelled(value: Any) -> str:
    """A value as text. Raises ValueError for what has no spelling."""
    return values.to_text(value, _leaf)


def target_name(target: Any) -> str:
    """What a function that a node calls is called. Raises ValueError for one without a name."""
    if isinstance(target, _torch.OpOverload):
        text = str(target)
        if _OPERATION.fullmatch(text) and operation(text) is target:
            return text
    elif target in _NAMES:
        return _NAMES[target]
    raise ValueError(f"it calls {target}")


def function_of(name: str) -> Callable[..., Any]:
    """The function that a node calls, by its name. Raises ValueError if there is none."""
    return FUNCTIONS[name] if name in FUNCTIONS else operation(name)


def operation(text: str) -> _torch.OpOverload:
    """One of torch's operations, by its name."""
    # The name may come from a file that anybody has written, so no other attribute of torch.ops is
    # looked up than these.
    match = _OPERATION.fullmatch(text)
    overload: Any = torch.ops
    for part in match.groups() if match else ():
        overload = getattr(overload, part, None)
    if not isinstance(overload, _torch.OpOverload):
        raise ValueError(f"there is no operation {text[:80]!r}")
    return overload


def name_of(value: torch.dtype | torch.layout | torch.memory_format) -> str:
    """What torch calls a dtype, layout or memory format."""
    return str(value).removeprefix("torch.")


def dtype_of(text: str) -> torch.dtype:
    """The dtype of a name. Raises ValueError if there is none."""
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {text[:80]}")
    return dtype


def device_of(text: str) -> torch.device:
    """The device of a name. Raises ValueError if there is none."""
    try:
        return torch.device(values.expect(str, text))
    except RuntimeError:
        raise ValueError(f"there is no device {text[:80]}") from None


def _leaf(value: Any) -> Any:
    """What only graphs have, as what JSON has."""
    # fx makes these of lists and dicts; a plain one has the same spelling, since none tells them
    # apart.
    if type(value) is immutable_list:
        return values.to_data([*value], _leaf)
    if type(value) is immutable_dict:
        return values.to_data({**value}, _leaf)
    for types, kind, spell in _SPELLINGS:
        if isinstance(value, types):
            return {kind: spell(value)}
    if _torch.is_expression(value):
        return {"size": values.to_data(_torch.tree_of_size(value), _leaf)}
    raise ValueError(f"it has a {type(value).__name__}")


def _tensor(value: torch.Tensor) -> list[Any]:
    """A tensor without its values. Raises ValueError for one that is more than its shape."""
    if type(value) not in (_torch.FakeTensor, torch.Tensor, torch.nn.Parameter):
        raise ValueError(f"it has a {type(value).__name__}")
    # None of this is in a shape and strides, so it would not come back.
    if value.layout != torch.strided or value.is_quantized or value.is_conj() or value.is_neg():
        raise ValueError("it has a tensor that is sparse, quantized or lazily conjugated")
    numbers = [*value.shape, *value.stride(), value.storage_offset()]
    if any(type(number) is not int for number in numbers):
        raise ValueError("it has a tensor of symbolic size")
    return [
        name_of(value.dtype),
        str(value.device),
        [*value.shape],
        [*value.stride()],
        value.storage_offset(),
        value.requires_grad,
    ]


# What `Reader` reads, but for sizes, whose types are sympy's.
_SPELLINGS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (fx.Node, "node", lambda node: node.name),
    (_ENUMS, "torch", name_of),
    (torch.device, "device", str),
    (_torch.OpOverload, "operation", target_name),
    (torch.Tensor, "value", _tensor),
)


class Reader:
    """Reads texts, by their numbers: `nodes` are those that they may name, and fake tensors are
    made in `mode`. Raises ValueError for texts that spell no value."""

    def __init__(
        self, texts: Sequence[str], nodes: Mapping[str, fx.Node], mode: _torch.FakeTensorMode
    ):
        self.data = [plain.parsed(text, "a text") for text in texts]
        self.leaves = {
            "node": nodes.__getitem__,
            "torch": _of_torch,
            "device": device_of,
            "operation": operation,
            "value": lambda parts: _fake(mode, *parts),
            "size": lambda tree: _torch.size_of_tree(values.from_data(tree, {})),
        }

    def __call__(self, at: int) -> Any:
        """The value that a text spells. Raises ValueError for any other text."""
        if not 0 <= at < len(self.data):
            raise ValueError(f"there is no text {at}")
        return values.from_data(self.data[at], self.leaves)


def _of_torch(name: str) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, _ENUMS):
        raise ValueError(f"torch.{name[:80]} is no dtype, layout or memory format")
    return value


def _fake(
    mode: _torch.FakeTensorMode,
    dtype: str,
    device: str,
    shape: list[int],
    stride: list[int],
    offset: int,
    asks: bool,
) -> torch.Tensor:
    numbers = [*values.expect(list, shape), *values.expect(list, stride), offset]
    if len(shape) != len(stride) or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError(f"{numbers} is no tensor"[:80])
    tensor = _torch.fake_tensor(mode, dtype_of(dtype), device_of(device), shape, stride, offset)
    return tensor.requires_grad_(values.expect(bool, asks))
