"""Numbers as people read them."""

from collections.abc import Sequence


def size(count: float) -> str:
    """Bytes with a unit."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB"))


def flops(count: float) -> str:
    """Floating-point operations with a unit."""
    return _scaled(count, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"))


def _scaled(count: float, step: int, units: Sequence[str]) -> str:
    """A whole number of the first unit, or a digit behind the point of a larger one."""
    at = next((i for i in range(len(units) - 1) if count < step ** (i + 1)), len(units) - 1)
    return f"{count / step**at:.{int(at > 0)}f} {units[at]}"


def duration(seconds: float) -> str:
    """Seconds with a unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


_UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(number: float) -> str:
    """A number with three digits and its unit."""
    for value, unit in _UNITS:
        if number >= value:
            return f"{number / value:.3g}{unit}"
    return f"{number:.3g}"
