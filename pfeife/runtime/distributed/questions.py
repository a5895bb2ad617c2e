"""What ranks ask one another for, and what they answer: JSON, and the tensors behind it."""

import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from pfeife.runtime.distributed.script import Point
from pfeife.runtime.failure import Refusal

_DTYPES = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


@attrs.frozen
class Named:
    """An optimizer as all ranks know it: its class, the numbers of the tensors of each group (-1
    for one that no rank trains), and which one of those it is, by the order of first steps."""

    kind: str
    groups: tuple[tuple[int, ...], ...]
    place: int


@attrs.frozen
class Question:
    """What a rank asks for at a point of its script: the values of tensors, by their numbers, or an
    `optimizer`'s state for these; or, `passing`, only to be told when the other one has asked as
    often as this one, or has gone on. `tag` is that of the answer's messages, to `reader`. Since
    their last change the script has written to the tensors by hand as often as `written` says.
    """

    reader: int
    tag: int
    point: Point
    tensors: tuple[int, ...] = ()
    optimizer: Named | None = None
    written: tuple[int, ...] = ()
    passing: bool = False


class Kind(enum.Enum):
    """The types of what is sent, such as states; pairs are those of a dict that has other keys than
    texts."""

    NONE = "None"
    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    STR = "str"
    TENSOR = "Tensor"
    LIST = "list"
    TUPLE = "tuple"
    DICT = "dict"
    PAIRS = "pairs"
    COUNTER = "Counter"


@attrs.frozen
class Value:
    """A value that is sent: as text, a tensor by its place in the answer, or what it
    is made of."""

    kind: Kind
    text: str = ""
    keys: tuple[str, ...] = ()
    items: tuple["Value", ...] = ()


@attrs.frozen
class Shaped:
    """A tensor that follows the answer, as dense bytes."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def empty(self, device: str = "cpu") -> torch.Tensor:
        """Room for it. Raises ValueError for what is no dtype or shape."""
        if self.dtype not in _DTYPES or min(self.shape, default=0) < 0:
            raise ValueError(f"{self.dtype}{list(self.shape)} is no kind of tensor")
        return torch.empty(self.shape, dtype=_DTYPES[self.dtype], device=device)

    def laid_out(self, dense: torch.Tensor) -> torch.Tensor:
        """The tensor with the strides that it had, if no two of its values share memory there."""
        found = torch.empty_strided(self.shape, self.stride, dtype=dense.dtype)
        return found.copy_(dense) if found.untyped_storage().nbytes() == dense.nbytes else dense


@attrs.frozen
class Answer:
    """Why there is none, or how many tensors follow; `states` are those of the tensors that were
    asked for, None where the optimizer has none."""

    refused: str = ""
    tensors: tuple[Shaped, ...] = ()
    states: tuple[Value | None, ...] = ()


@attrs.frozen
class Found:
    """What answers a question: tensors with names, and an optimizer's states that are made of
    them."""

    tensors: tuple[torch.Tensor, ...] = ()
    names: tuple[str, ...] = ()
    states: tuple[Value | None, ...] = ()

    def copied(self) -> "Found":
        """With copies on the CPU."""
        copies = (copied(tensor) for tensor in self.tensors)
        return attrs.evolve(self, tensors=(*copies,))


def shaped(tensor: torch.Tensor) -> Shaped:
    """What is told of a tensor. Raises Refusal for one that is not dense."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise Refusal(f"a tensor with the layout {tensor.layout} is not sent to other ranks")
    return Shaped(str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()))


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU that autograd knows nothing of."""
    return tensor.detach().to("cpu", copy=True)


def as_bytes(dense: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, in its own memory."""
    return dense.reshape(-1).view(torch.uint8)


def told(value: Any, tensors: list[torch.Tensor]) -> Value:
    """A value, such as an optimizer's state; its tensors are added to a list. Raises Refusal for
    types other than those of `Kind`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return Value(Kind.TENSOR, str(len(tensors) - 1))
    if isinstance(value, dict) and type(value) is not Counter and _by_name(value):
        return Value(Kind.DICT, "", tuple(value), _all_told(list(value.values()), tensors))
    if type(value) in (dict, Counter):
        pairs = [part for pair in value.items() for part in pair]
        kind = Kind.PAIRS if type(value) is dict else Kind.COUNTER
        return Value(kind, "", (), _all_told(pairs, tensors))
    if type(value) in (list, tuple):
        return Value(Kind(type(value).__name__), "", (), _all_told(value, tensors))
    if value is None or type(value) in (bool, int, str):
        return Value(Kind("None" if value is None else type(value).__name__), str(value))
    if type(value) is float:
        return Value(Kind.FLOAT, value.hex())
    raise Refusal(
        f"it has a {type(value).__name__}: only tensors, numbers, texts, and lists, tuples "
        "and dicts of these are sent to other ranks and saved"
    )


def _by_name(value: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in value)


def _all_told(values: Sequence[Any], tensors: list[torch.Tensor]) -> tuple[Value, ...]:
    return (*(told(value, tensors) for value in values),)


def heard(value: Value, tensors: Sequence[torch.Tensor]) -> Any:
    """The value that was `told`."""
    match value.kind:
        case Kind.TENSOR:
            return tensors[int(value.text)]
        case Kind.DICT:
            return dict(zip(value.keys, _all_heard(value, tensors), strict=True))
        case Kind.PAIRS | Kind.COUNTER:
            parts = _all_heard(value, tensors)
            pairs = dict(zip(parts[::2], parts[1::2], strict=True))
            return pairs if value.kind is Kind.PAIRS else Counter(pairs)
        case Kind.LIST:
            return list(_all_heard(value, tensors))
        case Kind.TUPLE:
            return tuple(_all_heard(value, tensors))
    read: dict[Kind, Callable[[str], Any]] = {
        Kind.NONE: lambda text: None,
        Kind.BOOL: lambda text: text == "True",
        Kind.INT: int,
        Kind.FLOAT: float.fromhex,
        Kind.STR: str,
    }
    return read[value.kind](value.text)


def _all_heard(value: Value, tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [heard(item, tensors) for item in value.items]
