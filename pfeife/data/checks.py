"""Validators of the decisions' fields: numbers that make sense, whoever wrote them."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

# Checks ask for `not value > 0` instead of `value <= 0`, since a NaN is to fail as well.
Check = Callable[[object, attrs.Attribute, Any], None]
# Beyond these a file is damaged; within them sums, squares and bytes by rate stay finite.
LONGEST = 1e12  # seconds
SLOWEST, FASTEST = 1e-9, 1e40  # bytes or operations per second


def named(instance: object, attribute: attrs.Attribute) -> str:
    """A field as errors call it."""
    return f"{type(instance).__name__}.{attribute.name}"


def number(instance: object, attribute: attrs.Attribute, value: float) -> None:
    """An int or a float."""
    if not isinstance(value, int | float):
        raise ValueError(f"{named(instance, attribute)} must be a number, not {value!r}")


def positive(instance: object, attribute: attrs.Attribute, value: float) -> None:
    """A number over 0."""
    number(instance, attribute, value)
    if not value > 0:
        raise ValueError(f"{named(instance, attribute)} must be positive, not {value}")


def not_negative(instance: object, attribute: attrs.Attribute, value: float | None) -> None:
    """A number from 0 on, or None."""
    if value is None:
        return
    number(instance, attribute, value)
    if not value >= 0:
        raise ValueError(f"{named(instance, attribute)} must not be negative, but is {value}")


def finite(instance: object, attribute: attrs.Attribute, value: float) -> None:
    """A number from 0 on that is not infinite, or None."""
    not_negative(instance, attribute, value)
    if value == float("inf"):
        raise ValueError(f"{named(instance, attribute)} must be finite, but is {value}")


def fraction(instance: object, attribute: attrs.Attribute, value: float) -> None:
    """A number from 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{named(instance, attribute)} must be from 0 to 1, not {value}")


def seconds(instance: object, attribute: attrs.Attribute, value: float | None) -> None:
    """A number from 0 to `LONGEST`, or None."""
    not_negative(instance, attribute, value)
    if value is not None and value > LONGEST:
        raise ValueError(f"{named(instance, attribute)} must be under {LONGEST:g}, but is {value}")


def rate(instance: object, attribute: attrs.Attribute, value: float) -> None:
    """A number from `SLOWEST` to `FASTEST`."""
    positive(instance, attribute, value)
    if not SLOWEST <= value <= FASTEST:
        raise ValueError(
            f"{named(instance, attribute)} must be from {SLOWEST:g} to {FASTEST:g}, not {value}"
        )


def each(check_entry: Check) -> Check:
    """The check of every number in a list, or by name; there may be none."""

    def check(instance: object, attribute: attrs.Attribute, value: Any) -> None:
        # The error names the entry, as in `Costs.seconds['stage_0_forward'] must not be negative`.
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value or ())
        for place, number in pairs:
            check_entry(instance, attribute.evolve(name=f"{attribute.name}[{place!r}]"), number)

    return check
