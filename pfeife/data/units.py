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
