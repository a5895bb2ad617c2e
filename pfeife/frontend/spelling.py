"""What an operation of a graph is given, as JSON, and back: exactly, or not at all.

JSON                            value
null, true, 3, "mean"           None, a bool, an int, a str
[...]                           a list
{"tuple": [...]}                a tuple; so {"dict": {...}}, {"slice": [...]}, {"ellipsis": []}
{"float": "0x1.8p+1"}           a float, bit for bit; {"complex": [..., ...]}
{"node": "add_1"}               what a node of the graph computes
{"torch": "float32"}            a dtype, layout or memory format of torch's
{"device": "cpu"}               a device
{"operation": "aten.add.Tensor"}
{"value": [dtype, device, shape, stride, offset, asks for gradients]}    a fake tensor
"""

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from pfeife import _torch
from pfeife.ir.program import size_tensor
from pfeife.ir.seeding import seeded

_LISTS, _DICTS = (list, immutable_list), (dict, immutable_dict)
_ENUMS = (torch.dtype, torch.layout, torch.memory_format)
_OPERATION = re.compile(r"(aten|prims|pfeife)\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)", re.ASCII)
_NUMBERS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_"),
)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "seeded": seeded,
    "size_tensor": size_tensor,
    "sym_float": torch.sym_float,
    **{name: getattr(operator, name) for name in _NUMBERS},
}
_NAMES = {function: name for name, function in FUNCTIONS.items()}


def spelled(value: Any) -> str:
    """A value as text. Raises ValueError for what has no spelling."""
    return json.dumps(_plain(value), separators=(",", ":"), allow_nan=False)


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
    match = _OPERATION.fullmatch(text)
    found: Any = torch.ops
    for part in match.groups() if match else ():
        found = getattr(found, part, None)
    if not isinstance(found, _torch.OpOverload):
        raise ValueError(f"there is no operation {text[:80]!r}")
    return found


def name_of(value: torch.dtype | torch.layout | torch.memory_format) -> str:
    """What torch calls a dtype, layout or memory format."""
    return str(value).removeprefix("torch.")


def dtype_of(text: str) -> torch.dtype:
    """The dtype of a name. Raises ValueError if there is none."""
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {text[:80]}")
    return found


def device_of(text: str) -> torch.device:
    """The device of a name. Raises ValueError if there is none."""
    try:
        return torch.device(text)
    except RuntimeError:
        raise ValueError(f"there is no device {text[:80]}") from None


def _plain(value: Any) -> Any:
    """A value as what JSON has."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind in _LISTS:
        return [_plain(one) for one in value]
    if kind is tuple:
        return {"tuple": [_plain(one) for one in value]}
    if kind in _DICTS and all(type(key) is str for key in value):
        return {"dict": {key: _plain(one) for key, one in value.items()}}
    if kind is slice:
        return {"slice": [_plain(one) for one in (value.start, value.stop, value.step)]}
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if value is Ellipsis:
        return {"ellipsis": []}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, _ENUMS):
        return {"torch": name_of(value)}
    if kind is torch.device:
        return {"device": str(value)}
    if isinstance(value, _torch.OpOverload):
        return {"operation": target_name(value)}
    if isinstance(value, torch.Tensor):
        return {"value": _tensor(value)}
    raise ValueError(f"it has {_short(value)}")


def _tensor(value: torch.Tensor) -> list[Any]:
    """A tensor without its values. Raises ValueError for one that is more than its shape."""
    if type(value) not in (_torch.FakeTensor, torch.Tensor, torch.nn.Parameter):
        raise ValueError(f"it has a {type(value).__name__}")
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


class Reader:
    """Reads texts, by their numbers: `nodes` are those that they may name, and fake tensors are
    made in `mode`. What cannot be changed is read once."""

    def __init__(
        self, texts: Sequence[str], nodes: Mapping[str, fx.Node], mode: _torch.FakeTensorMode
    ):
        self.texts, self.nodes, self.mode = texts, nodes, mode
        self.known: dict[int, Any] = {}
        self.once = True

    def __call__(self, at: int) -> Any:
        """The value that a text spells. Raises ValueError for any other text."""
        if at in self.known:
            return self.known[at]
        if not 0 <= at < len(self.texts):
            raise ValueError(f"there is no text {at}")
        self.once = True
        try:
            found = self.value(json.loads(self.texts[at]))
        except (KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{self.texts[at][:80]} spells no value: {error!r}") from None
        if self.once:
            self.known[at] = found
        return found

    def value(self, data: Any) -> Any:
        if data is None or type(data) in (bool, int, str):
            return data
        if type(data) is list:
            self.once = False
            return [self.value(one) for one in data]
        if type(data) is not dict or len(data) != 1:
            raise ValueError(f"{_short(data)} spells no value")
        ((kind, inside),) = data.items()
        self.once = self.once and kind not in ("dict", "node", "value")
        reader = getattr(self, f"of_{kind}", None)
        if kind not in _KINDS or reader is None:
            raise ValueError(f"{_short(kind)} is no kind of value")
        return reader(inside)

    def of_tuple(self, inside: list) -> tuple:
        return tuple([self.value(one) for one in _of(list, inside)])

    def of_dict(self, inside: dict) -> dict:
        return {key: self.value(one) for key, one in _of(dict, inside).items()}

    def of_slice(self, inside: list) -> slice:
        start, stop, step = (self.value(one) for one in inside)
        return slice(start, stop, step)

    def of_float(self, inside: str) -> float:
        return float.fromhex(inside)

    def of_complex(self, inside: list) -> complex:
        real, imag = map(float.fromhex, inside)
        return complex(real, imag)

    def of_ellipsis(self, inside: list) -> Any:
        return ...

    def of_node(self, inside: str) -> fx.Node:
        return self.nodes[inside]

    def of_torch(self, inside: str) -> Any:
        found = getattr(torch, _of(str, inside))
        if not isinstance(found, _ENUMS):
            raise ValueError(f"torch.{inside[:80]} is no dtype, layout or memory format")
        return found

    def of_device(self, inside: str) -> torch.device:
        return device_of(_of(str, inside))

    def of_operation(self, inside: str) -> _torch.OpOverload:
        return operation(_of(str, inside))

    def of_value(self, inside: list) -> torch.Tensor:
        dtype, device, shape, stride, offset, asks = inside
        numbers = [*_of(list, shape), *_of(list, stride), offset]
        if len(shape) != len(stride) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"{_short(inside)} is no tensor")
        kind, where = dtype_of(_of(str, dtype)), self.of_device(device)
        found = _torch.fake_tensor(self.mode, kind, where, shape, stride, offset)
        return found.requires_grad_(_of(bool, asks))


_KINDS = (
    *("tuple", "dict", "slice", "ellipsis", "float", "complex"),
    *("node", "torch", "device", "operation", "value"),
)


def _of(kind: type, data: Any) -> Any:
    if type(data) is not kind:
        raise ValueError(f"expected a {kind.__name__}, got {_short(data)}")
    return data


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"
    return text[:80]
