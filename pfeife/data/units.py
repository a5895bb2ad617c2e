"""Numbers as people read them."""


def size(count: float) -> str:
    """Bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def flops(count: float) -> str:
    """Floating-point operations with a unit."""
    for unit in ("", "k", "M", "G", "T"):
        if count < 1000 or unit == "T":
            return f"{count:.0f} FLOP" if not unit else f"{count:.1f} {unit}FLOP"
        count /= 1000
    raise AssertionError


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
