"""Frozen attrs data to JSON and back, exactly and strictly."""

import json
import math
import os
import tempfile
import types
import typing
from enum import Enum
from pathlib import Path
from reprlib import repr as short  # a damaged file of 64 MiB makes no message of 64 MiB
from typing import Any

import attrs

T = typing.TypeVar("T")

LARGEST_FILE = 64 * 2**20


def to_json(value: Any) -> str:
    """One value of an attrs class as JSON text."""
    return json.dumps(_plain(value), indent=1, allow_nan=False)


def from_json(cls: type[T], text: str) -> T:
    """The value that `to_json` wrote. Raises ValueError for anything that does not fit."""
    try:
        data = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{cls.__name__}: this is not JSON: {error}") from None
    return typing.cast(T, _typed(data, cls, cls.__name__))


def save(value: Any, path: Path | str) -> None:
    """Writes a value's JSON to a file at once: readers see the old file or the new one."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(to_json(value))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load(cls: type[T], path: Path | str) -> T:
    """Reads what `save` wrote. Raises ValueError for a damaged file or one over 64 MiB."""
    path = Path(path)
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path}: larger than {LARGEST_FILE} bytes, so not a {cls.__name__}")
    try:
        return from_json(cls, path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


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
    assert value is None or isinstance(value, str | int | float | bool), value
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"an object has a field twice: {short([key for key, _ in pairs])}")
    return found


def _typed(data: Any, kind: Any, where: str) -> Any:
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
        return tuple(
            _typed(d, k, f"{where}[{i}]") for i, (d, k) in enumerate(zip(data, kinds, strict=True))
        )
    if origin is dict:
        if not isinstance(data, dict):
            raise ValueError(f"{where}: expected an object, got {short(data)}")
        return {key: _typed(item, arguments[1], f"{where}.{key}") for key, item in data.items()}
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
    if type(data) is not kind:
        raise ValueError(f"{where}: expected {kind.__name__}, got {short(data)}")
    return data


def _finite(data: Any, where: str) -> float:
    try:
        number = float(data) if type(data) in (int, float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{where}: expected a finite float, got {short(data)}")
    return number


def _object(data: Any, kind: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object, got {short(data)}")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in attrs.fields(kind)}
    unknown = sorted(set(data) - set(fields))
    missing = sorted(n for n, f in fields.items() if n not in data and f.default is attrs.NOTHING)
    if unknown or missing:
        raise ValueError(f"{where}: unknown fields {short(unknown)}, missing fields {missing}")
    try:
        return kind(**{n: _typed(item, hints[n], f"{where}.{n}") for n, item in data.items()})
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None
