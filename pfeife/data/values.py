"""Values of Python as JSON, and back: exactly, or not at all. (`plain` has those of attrs classes.)

JSON                              value
null, true, 3, "mean"             None, a bool, an int, a str
[...]                             a list
{"tuple": [...]}                  a tuple
{"dict": {"lr": ...}}             a dict whose keys are texts
{"pairs": [[key, value], ...]}    a dict with other keys; so {"Counter": [...]}
{"float": "0x1.8p+1"}             a float, bit for bit; {"complex": [..., ...]}
{"slice": [...]}                  a slice; {"ellipsis": []}
{"node": "add_1"}                 a leaf, whose kind the caller knows
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pfeife.data import plain

_WRONG = (LookupError, TypeError, AttributeError, RuntimeError, OverflowError)


def to_text(value: Any, leaf: Callable[[Any], Any]) -> str:
    """A value as JSON text. `leaf` is asked for the JSON of what is none of the above: an object
    of its kind and what tells it from others, or what `to_data` makes of its parts."""
    return json.dumps(to_data(value, leaf), separators=(",", ":"), allow_nan=False)


def from_text(text: str, leaves: Mapping[str, Callable[[Any], Any]]) -> Any:
    """The value of a text that `to_text` wrote; `leaves` read what stands in those of a kind.
    Raises ValueError for any other text."""
    return from_data(plain.parsed(text, "a value"), leaves)


def to_data(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """A value as what JSON has."""

    def parts(values: Iterable[Any]) -> list[Any]:
        return [to_data(part, leaf) for part in values]

    # Exact types: an IntEnum or a namedtuple would come back as an int or a tuple, so it is a leaf.
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is list:
        return parts(value)
    if kind is tuple:
        return {"tuple": parts(value)}
    if kind is dict and all(isinstance(key, str) for key in value):
        return {"dict": dict(zip(value, parts(value.values()), strict=True))}
    if kind in (dict, Counter):
        return {"pairs" if kind is dict else "Counter": parts(map(list, value.items()))}
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is slice:
        return {"slice": parts((value.start, value.stop, value.step))}
    if value is Ellipsis:
        return {"ellipsis": []}
    return leaf(value)


def from_data(data: Any, leaves: Mapping[str, Callable[[Any], Any]]) -> Any:
    """The value of what `to_data` gave. Raises ValueError for anything else."""
    try:
        return _value(data, leaves)
    except _WRONG as error:
        raise ValueError(f"{plain.short(data)} is no value: {error!r}") from None


def _value(data: Any, leaves: Mapping[str, Callable[[Any], Any]]) -> Any:
    def parts(inside: Any) -> list[Any]:
        return [_value(part, leaves) for part in expect(list, inside)]

    if data is None or type(data) in (bool, int, str):
        return data
    if type(data) is list:
        return parts(data)
    # All that is no list or simple value is an object with one field, which names what it is: so a
    # dict of the user's is never taken for one of ours.
    if type(data) is not dict or len(data) != 1:
        raise ValueError(f"{plain.short(data)} is no value")
    ((kind, inside),) = data.items()
    match kind:
        case "tuple":
            return tuple(parts(inside))
        case "dict":
            return {key: _value(part, leaves) for key, part in expect(dict, inside).items()}
        case "pairs" | "Counter":
            pairs = {key: part for key, part in map(parts, inside)}
            return pairs if kind == "pairs" else Counter(pairs)
        case "float":
            return float.fromhex(inside)
        case "complex":
            real, imag = map(float.fromhex, inside)
            return complex(real, imag)
        case "slice":
            start, stop, step = parts(inside)
            return slice(start, stop, step)
        case "ellipsis":
            return ...
    if kind not in leaves:
        raise ValueError(f"{plain.short(kind)} is no kind of value")
    return leaves[kind](inside)


def expect(kind: type, data: Any) -> Any:
    """What a leaf holds, if that is of a kind. Raises ValueError if not."""
    if type(data) is not kind:
        raise ValueError(f"expected a {kind.__name__}, got {plain.short(data)}")
    return data
