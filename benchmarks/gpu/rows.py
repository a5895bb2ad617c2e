"""What a row is: something that is tried, and what is said of it."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

# Parts in the order in which they tell most; of those of `TIMED` one row runs at a time.
PARTS = (
    *("machine", "correctness", "timing", "nccl", "measuring", "training", "members"),
    *("compiled", "peers"),
)
TIMED = ("timing", "nccl", "measuring", "compiled", "peers")
GOOD = ("right", "skipped")

Figures = Mapping[str, Any]  # numbers and texts that go to JSON


class Wrong(Exception):
    """What ran and gave other numbers, or was slower, than it should be."""

    def __init__(self, why: str, **figures: Any):
        super().__init__(why)
        self.figures = figures


class Skipped(Exception):
    """Why a row cannot run here."""


@attrs.frozen
class Setting:
    """Where rows run: `devices` by name, those that are there; `small` for sizes of a CPU."""

    devices: tuple[str, ...]
    small: bool

    @property
    def device(self) -> str:
        return self.devices[0]

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def twice(self) -> list[str]:
        """A device for each of two ranks, which share the first."""
        return [self.device, self.device]


@attrs.frozen
class Row:
    """`run` gives figures, or raises `Wrong`, `Skipped` or what else comes. It is given up after
    so many `seconds`. `cuda` rows are skipped on a CPU, those of more `devices` than are there."""

    name: str
    run: Callable[[Setting], Figures]
    seconds: float = 60.0
    cuda: bool = False
    devices: int = 1


@attrs.frozen
class Verdict:
    """What became of a row: "right", "wrong", "error", "timeout" or "skipped", and `why`."""

    name: str
    verdict: str
    seconds: float = 0.0
    why: str = ""
    figures: Figures = attrs.Factory(dict)

    def __str__(self) -> str:
        told = [f"{name} {shown(value)}" for name, value in self.figures.items()]
        said = "; ".join([*([self.why] if self.why else []), *told])
        return f"{self.verdict:8}{self.seconds:6.1f} s  {self.name}  {said}"


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def rows_of(part: str) -> Sequence[Row]:
    """The rows of a part, the most telling first."""
    return importlib.import_module(f"gpu.{part}").ROWS


def row_called(name: str) -> Row:
    """By its name, with its part in front: "timing/four stages"."""
    part, _, rest = name.partition("/")
    return next(row for row in rows_of(part) if row.name == rest)
