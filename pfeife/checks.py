"""Validators of the decisions' fields: numbers that make sense, whoever wrote them."""

from collections.abc import Mapping
from typing import Any

import attrs


def named(instance: object, attribute: attrs.Attribute) -> str:
    """A field as messages call it."""
    return f"{type(instance).__name__}.{attribute.name}"


def positive(instance: object, attribute: attrs.Attribute, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{named(instance, attribute)} must be positive, not {value}")


def not_negative(instance: object, attribute: attrs.Attribute, value: float | None) -> None:
    if value is not None and not value >= 0:
        raise ValueError(f"{named(instance, attribute)} must not be negative, but is {value}")


def fraction(instance: object, attribute: attrs.Attribute, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{named(instance, attribute)} must be from 0 to 1, not {value}")


def none_negative(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    """For a list of numbers, or numbers by name."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value or ())
    for place, number in pairs:
        if not number >= 0:
            raise ValueError(
                f"{named(instance, attribute)}[{place!r}] must not be negative, but is {number}"
            )
