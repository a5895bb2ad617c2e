"""Whether data that was read has the declared types."""

import math
import types
import typing

import attrs


def well_typed(value: object, hint: typing.Any) -> bool:
    """Whether a value and all in it have exactly the declared types, floats being finite."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(well_typed(value, argument) for argument in arguments)
    if origin is tuple:
        return type(value) is tuple and all(well_typed(item, arguments[0]) for item in value)
    if origin is dict:
        pairs = value.items() if type(value) is dict else [(None, None)]
        return all(well_typed(k, arguments[0]) and well_typed(v, arguments[1]) for k, v in pairs)
    if attrs.has(hint):
        hints = typing.get_type_hints(hint)
        return type(value) is hint and all(well_typed(getattr(value, n), hints[n]) for n in hints)
    return type(value) is hint and (hint is not float or math.isfinite(value))
