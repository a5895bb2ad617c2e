"""Links between ranks: measured ones, and kinds whose figures come with the package."""

import functools
import re
from bisect import bisect_right
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import resources
from itertools import pairwise
from reprlib import repr as short

import attrs

from pfeife.data import checks, plain

_SHIPPED = resources.files("pfeife.data") / "links"
_FIGURES = ("bandwidth", "latency", "overlap")


def _figures(instance: object, attribute: attrs.Attribute, value: Mapping[str, str]) -> None:
    unknown = sorted(set(value) - set(_FIGURES))
    if unknown:
        raise ValueError(
            f"{checks.named(instance, attribute)}: {short(unknown)} are no figures of a link; "
            f"there are {list(_FIGURES)}"
        )


@attrs.frozen
class Link:
    """One direction between two ranks, for messages of `sizes[i]` bytes.

    `seconds[i]` until it has arrived at a rank that waits for it; `sending[i]` and
    `receiving[i]` are what it takes away from the computing of the two ranks (the cost model is
    LogGP's with all of it by size; Alexandrov et al., JPDC 1997). Straight lines between the
    sizes, the last one going on. `residual` is the largest relative error of the fit to
    `seconds`.
    """

    source: int = attrs.field(validator=checks.not_negative)
    destination: int = attrs.field(validator=checks.not_negative)
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    sending: tuple[float, ...]
    receiving: tuple[float, ...]
    residual: float

    def __attrs_post_init__(self) -> None:
        where = f"Link {self.source} -> {self.destination}"
        if self.source == self.destination:
            raise ValueError(f"{where}: a link is between two ranks")
        lengths = {len(self.sizes), len(self.seconds), len(self.sending), len(self.receiving)}
        # Comparisons below are written so that a NaN fails them.
        if lengths != {len(self.sizes)} or len(self.sizes) < 2:
            raise ValueError(f"{where}: figures for {lengths} sizes")
        if self.sizes[0] != 0 or any(low >= high for low, high in pairwise(self.sizes)):
            raise ValueError(f"{where}: Link.sizes must ascend from 0, not {self.sizes}")
        for values in (self.seconds, self.sending, self.receiving):
            if not values[0] >= 0 or any(not low <= high for low, high in pairwise(values)):
                raise ValueError(f"{where}: seconds {values} are negative or fall")
        if not self.seconds[-1] > 0 or not self.residual >= 0:
            raise ValueError(f"{where}: no seconds, or a residual of {self.residual}")
        longest = max(self.seconds[-1], self.sending[-1], self.receiving[-1])
        if longest > checks.LONGEST:
            raise ValueError(f"{where}: a message takes {longest} seconds, over {checks.LONGEST:g}")

    def transfer_seconds(self, size: int) -> float:
        """Seconds until a message of so many bytes has arrived."""
        return self._at(self.seconds, size)

    def send_seconds(self, size: int) -> float:
        """What a message takes of the time of the rank that sends it."""
        return self._at(self.sending, size)

    def receive_seconds(self, size: int) -> float:
        """What a message takes of the time of the rank that receives it."""
        return self._at(self.receiving, size)

    def _at(self, seconds: tuple[float, ...], size: int) -> float:
        # Between the two sizes around it; beyond all of them the last line goes on.
        #     seconds  |         ./     sizes     0    s1        s2
        #              |     .--`       segment      1       2      2 goes on
        #              |.--``           at = 1 up to s1, then 2
        at = min(max(bisect_right(self.sizes, size), 1), len(self.sizes) - 1)
        low, high = self.sizes[at - 1], self.sizes[at]
        slope = (seconds[at] - seconds[at - 1]) / (high - low)
        return seconds[at - 1] + slope * (size - low)


@attrs.frozen
class LinkKind:
    """What links of a kind have: figures are sustained, not peak.

    `bandwidth` is of one direction between two ranks, in bytes per second; `latency` in seconds;
    `overlap` is the fraction of a transfer's time that is hidden from the ranks' computing, as in
    `Machine`. `sources` says for a figure where it comes from and what was assumed.
    """

    name: str
    bandwidth: float = attrs.field(validator=checks.rate)
    latency: float = attrs.field(default=0.0, validator=checks.seconds)
    overlap: float = attrs.field(default=1.0, validator=checks.fraction)
    sources: dict[str, str] = attrs.field(factory=dict, validator=_figures, repr=False, hash=False)

    def transfer_seconds(self, size: int) -> float:
        """Seconds until a message of so many bytes has arrived."""
        return self.latency + size / self.bandwidth

    def send_seconds(self, size: int) -> float:
        """What a message takes of the time of either of its ranks."""
        return (1 - self.overlap) * self.transfer_seconds(size)

    receive_seconds = send_seconds


_WRITTEN = re.compile(r"(\d+(?:\.\d+)?)([KMGT]B)/s(?:,(\d+(?:\.\d+)?)(ns|us|ms|s))?", re.ASCII)
_BYTES = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@functools.cache
def link_kinds() -> tuple[str, ...]:
    """The names of the kinds whose figures come with the package."""
    names = (file.name for file in _SHIPPED.iterdir())
    return tuple(sorted(n.removesuffix(".json") for n in names if n.endswith(".json")))


@functools.cache
def link_kind(name: str) -> LinkKind:
    """The shipped figures of this name, or figures as text: bytes a second of one direction, and
    the latency. Raises ValueError for another one.

    >>> link_kind("25GB/s,20us").transfer_seconds(0)
    2e-05

    >>> link_kind("ib-ndr").bandwidth  # bytes per second
    48000000000.0
    >>> link_kind("nvlink")
    Traceback (most recent call last):
    ValueError: link 'nvlink' is none of [...]; the nearest is 'nvlink5'
    """
    figures = _WRITTEN.fullmatch(str(name))
    if figures:
        rate, unit, latency, short = figures.groups()
        seconds = float(latency or 0) * _SECONDS[short or "s"]
        return LinkKind(name, float(rate) * _BYTES[unit], seconds)
    if name not in link_kinds():
        near = get_close_matches(str(name).lower(), link_kinds(), n=1, cutoff=0.0)
        raise ValueError(
            f"link {name!r} is none of {list(link_kinds())}; the nearest is {near[0]!r}; "
            "figures of your own are a LinkKind, or a text such as '25GB/s,20us'"
        )
    return plain.from_json(LinkKind, (_SHIPPED / f"{name}.json").read_text(encoding="utf-8"))
