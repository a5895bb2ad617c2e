"""Frozen attrs data to JSON and back, exactly and strictly.

cattrs could take the place of `_plain` and `_typed`, but the core must read plans without it, and
unless it is told for each type, it makes an int of 3.7 and of "3".
"""

import functools
import hashlib
import json
import math
import types
import typing
from collections import Counter
from enum import Enum
from pathlib import Path
from reprlib import repr as short  # a damaged file of 64 MiB makes no error of 64 MiB
from typing import Any

import attrs

from pfeife.data import files

T = typing.TypeVar("T")

LARGEST_FILE = 64 * 2**20
MOST_ITEMS = 2**22  # of all lists and objects: a text of 64 MiB could take 2 GiB as values
_CHECKSUM, _ABSENT = "sha256", object()


def to_json(value: Any) -> str:
    """One value of an attrs class as JSON text."""
    return json.dumps(_plain(value), indent=1, allow_nan=False)


def from_json(cls: type[T], text: str, *, need_checksum: bool = False) -> T:
    """The value that `to_json` wrote, or `save`, whose checksum must be right.

    Raises ValueError for anything that does not fit, for a text over 64 MiB or one of more than
    4 million items, and, where the text `need_checksum`, if it has none.
    """
    # Files come from anybody: types are checked before a class sees them, and classes check ranges.
    data = parsed(text, cls.__name__)
    checksum = data.pop(_CHECKSUM, _ABSENT) if isinstance(data, dict) else _ABSENT
    value = _typed(data, cls, cls.__name__)  # first: its errors name the field
    if checksum is not _ABSENT or need_checksum:
        _check(data, checksum, cls.__name__)
    return typing.cast(T, value)


def parsed(text: str, name: str) -> Any:
    """What JSON has there, under the bounds of `from_json`, where no object has a field twice.
    Raises ValueError with a name."""
    if len(text) > LARGEST_FILE:
        raise ValueError(f"{name}: a text of more than {LARGEST_FILE} characters")
    # Counted before the text takes memory as values: commas in strings count too, but no item less.
    if sum(map(text.count, ",[{")) > MOST_ITEMS:
        raise ValueError(f"{name}: a text of more than {MOST_ITEMS} items")
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: this is not JSON: {error}") from None


def save(value: Any, path: Path | str) -> None:
    """Writes a value's JSON, with a checksum, to a file at once: see `files.write_text`.

    Raises ValueError for what `load` would refuse: a value of another type than its field's, a
    number that is not finite, more than 64 MiB.
    """
    data = _plain(value)
    _typed(data, type(value), type(value).__name__)
    text = json.dumps({_CHECKSUM: _checksum(data), **data}, indent=1, allow_nan=False)
    if len(text) > LARGEST_FILE:
        raise ValueError(f"{path}: the {type(value).__name__} takes more than {LARGEST_FILE} bytes")
    files.write_text(Path(path), text)


def load(cls: type[T], path: Path | str, *, need_checksum: bool = False) -> T:
    """Reads what `save` wrote, or somebody by hand (then without a checksum).

    Raises ValueError as `from_json` and `files.read_text` do, with the path.
    """
    text = files.read_text(Path(path), LARGEST_FILE)
    try:
        return from_json(cls, text, need_checksum=need_checksum)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _checksum(data: dict[str, Any]) -> str:
    """Of the content: line breaks and the order of the fields do not matter."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _check(data: dict[str, Any], checksum: Any, where: str) -> None:
    if checksum is _ABSENT:
        raise ValueError(f"{where}: there is no checksum; only what `save` wrote is read here")
    if checksum != _checksum(data):
        raise ValueError(
            f"{where}: the content does not have the checksum {short(checksum)}: the file is "
            f"damaged, or was edited; remove the field {_CHECKSUM!r} if its content is meant"
        )


def _plain(value: Any) -> Any:
    if attrs.has(type(value)):
        return {
            field.name: _plain(getattr(value, field.name)) for field in attrs.fields(type(value))
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(f"{short(value)}: no {type(value).__name__} goes into JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        ((doubled, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has a field twice: {short(doubled)}")
    return fields


def _typed(data: Any, kind: Any, where: str) -> Any:
    # By the type that a field declares, never by what the file says it is: so a file cannot choose
    # which class is made. Simple kinds stand first: most values are of these.
    if kind in (int, str, bool):
        return _simple(data, kind, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        (kind,) = (a for a in arguments if a is not type(None))
        return _typed(data, kind, where)
    if origin is tuple:
        if not isinstance(data, list):
            raise ValueError(f"{where}: expected a list, got {short(data)}")
        if arguments[-1] is not Ellipsis and len(data) != len(arguments):
            raise ValueError(f"{where}: expected {len(arguments)} items, got {len(data)}")
        kinds = [arguments[0]] * len(data) if arguments[-1] is Ellipsis else arguments
        items = enumerate(zip(data, kinds, strict=True))
        return (*(_typed(item, kind, f"{where}[{at}]") for at, (item, kind) in items),)
    if origin is dict:
        if not isinstance(data, dict):
            raise ValueError(f"{where}: expected an object, got {short(data)}")
        named = {_typed(key, str, f"{where}: a name"): item for key, item in data.items()}
        return {key: _typed(item, arguments[1], _at(where, key)) for key, item in named.items()}
    if attrs.has(kind):
        return _object(data, kind, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(data)
        except ValueError:
            raise ValueError(
                f"{where}: {short(data)} is none of {[m.value for m in kind]}"
            ) from None
    if kind is float:
        return _finite(data, where)
    return _simple(data, kind, where)


def _simple(data: Any, kind: Any, where: str) -> Any:
    if type(data) is not kind:
        # Exactly this type: True is no int, and 3.0 is none, however often people write it.
        whole = kind is int and type(data) is float and data.is_integer()
        write = f"; write {int(data)}" if whole and abs(data) < 2**63 else ""
        raise ValueError(f"{where}: expected {kind.__name__}, got {short(data)}{write}")
    if kind is int and not -(2**63) <= data < 2**63:
        raise ValueError(f"{where}: expected an int of 64 bits, got {short(data)}")
    if kind is str and not data.isascii():
        _check_text(data, where)
    return data


def _at(where: str, key: str) -> str:
    return f"{where}.{key if len(key) < 80 and key.isprintable() else short(key)}"


def _check_text(data: str, where: str) -> None:
    try:
        data.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: half a surrogate pair in {short(data)}") from None


def _finite(data: Any, where: str) -> float:
    try:
        number = float(data) if type(data) in (int, float) else math.nan
    except OverflowError:  # JSON has ints of any length
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{where}: expected a finite float, got {short(data)}")
    return number


_hints = functools.cache(typing.get_type_hints)


def _object(data: Any, kind: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object, got {short(data)}")
    hints = _hints(kind)
    fields = {field.name: field for field in attrs.fields(kind)}
    # A field of a later release is refused, not dropped: what it decides would be undone unseen.
    unknown = sorted(set(data) - set(fields))
    missing = sorted(n for n, f in fields.items() if n not in data and f.default is attrs.NOTHING)
    if unknown or missing:
        raise ValueError(f"{where}: unknown fields {short(unknown)}, missing fields {missing}")
    values = {name: _typed(item, hints[name], f"{where}.{name}") for name, item in data.items()}
    try:
        return kind(**values)
    except ValueError as error:  # of the class itself: it knows its fields, not its place
        raise ValueError(f"{where}: {error}") from None
