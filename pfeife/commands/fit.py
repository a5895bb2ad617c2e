"""`pfeife fit`: the fewest ranks that hold a step, and the largest batch and sequence that fit."""

import argparse
import itertools
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import attrs

from pfeife.commands.words import count, plan_arguments, step_arguments

if TYPE_CHECKING:
    from pfeife.data.forecast import Forecast

HELP = "how few ranks hold a training step, and how large a batch and sequence fit"
EXAMPLES = """\
examples:
  a model by its configuration, with AdamW
    pfeife fit transformers:LlamaConfig --machine h100-sxm --precision bf16-mixed --optimizer AdamW
  what fits on the eight ranks that you have, and what it costs at 2.50 a rank and hour
    pfeife fit config.json --machine a100-sxm-80gb --ranks 8 --optimizer AdamW --price 2.5

Each answer is a plan, with recomputation where memory asks for it (--recompute auto) unless you say
otherwise. Ranks are searched to the one, rows of a microbatch and tokens of a row by doubling."""
_PER_RANK = 4  # microbatches for each rank, unless they are said


@attrs.frozen
class Fits:
    """What fits, in words, and its forecast."""

    what: str
    forecast: "Forecast"


def arguments(parser: argparse.ArgumentParser) -> None:
    step_arguments(parser)
    plan_arguments(parser, sized=False)
    parser.add_argument("--ranks", type=count, help="of all replicas; searched unless given")
    parser.add_argument("--microbatches", type=count, help="of a step; 4 a rank unless given")
    parser.add_argument("--most", type=count, default=4096, help="ranks, rows or tokens x 1024")
    parser.add_argument("--price", type=float, help="of a rank and hour, in any currency")


def run(given: argparse.Namespace) -> str:
    """A line for the fewest ranks, the largest microbatch and the longest sequence."""
    from pfeife.commands.programs import saved, with_precision
    from pfeife.report import table

    stored = saved(given.what)
    given = with_precision(given, stored)
    given = _with(given, recompute=given.recompute or "auto")
    planned = _Planned(stored)
    ranks = given.ranks or _fewest(lambda n: planned(_with(given, ranks=n)), given.most)
    fewest = "" if given.ranks else ", the fewest"
    given = _with(given, ranks=ranks)
    first = planned(given)
    if first is None:
        raise ValueError(f"{given.what} does not fit on {ranks} ranks: {planned.reason}")
    found = [Fits(f"{ranks} ranks{fewest}", first)]
    if stored is None and given.batch is None:
        each = given.microbatches or _PER_RANK * ranks
        rows = _doubled(lambda n: planned(_with(given, batch=n * each)), 1, given.most)
        found += [Fits(f"{n} rows a microbatch, the most", one) for n, one in rows]
    if stored is None and first.tokens:
        start = first.tokens // first.samples
        more = _doubled(lambda n: planned(_with(given, sequence=n)), start, 1024 * given.most)
        found += [Fits(f"{n} tokens a row, the most", one) for n, one in more]
    head = (
        "fits",
        "rows",
        "step",
        "memory",
        "MFU",
        "tokens a day" if first.tokens else "rows a day",
    )
    rows_of = [_row(one, given.price) for one in found]
    text = table(rows_of, (*head, "cost a billion") if given.price else head)
    return f"{text}\n\nasked   {given.typed}\nlimit   {planned.reason or 'none was met'}"


class _Planned:
    """Forecasts of a step; None for one that memory refuses, whose `reason` is the last."""

    def __init__(self, stored: Any):
        self.stored, self.reason = stored, ""
        self.programs: dict[Any, Any] = {}

    def __call__(self, given: argparse.Namespace) -> "Forecast | None":
        from pfeife.commands.plan import question_of
        from pfeife.commands.programs import program_of
        from pfeife.forecasting import forecast

        microbatches = given.microbatches or _PER_RANK * given.ranks
        given = _with(given, microbatches=microbatches)
        key = (given.batch or microbatches) / microbatches, given.sequence
        if key not in self.programs:
            self.programs[key] = program_of(given, microbatches, self.stored).program
        try:
            return forecast(self.programs[key], **question_of(given)).forecast
        except ValueError as error:
            if not about_memory(str(error)):
                raise
            self.reason = " ".join(str(error).split())
            return None


def about_memory(reason: str) -> bool:
    """Whether a plan was refused since it does not fit."""
    return "bytes" in reason and re.search("limit|fits|memory|machine", reason) is not None


def _with(given: argparse.Namespace, **more: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(given), **more})


def _fewest(fits: Callable[[int], Any], most: int) -> int:
    """The fewest ranks that hold a step: doubled until they do, and then between."""
    high = next((n for n in _doubles(1, most) if fits(n)), 0)
    if not high:
        raise ValueError(f"it does not fit on {most} ranks (--most)")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _doubled(
    fits: Callable[[int], "Forecast | None"], start: int, most: int
) -> list[tuple[int, "Forecast"]]:
    """The largest double of a number that fits, with its forecast; none if not even that does."""
    tried = ((n, fits(n)) for n in _doubles(start, most))
    good = [(n, one) for n, one in itertools.takewhile(lambda pair: pair[1], tried) if one]
    return good[-1:]


def _doubles(start: int, most: int) -> Iterator[int]:
    while start <= most:
        yield start
        start *= 2


def _row(one: Fits, price: float | None) -> tuple:
    from pfeife.data.units import count as counted
    from pfeife.report import size

    found = one.forecast
    rate = found.tokens_per_second or found.samples_per_second
    words = (
        one.what,
        found.samples,
        f"{found.step_seconds:.4g} s",
        size(found.peak_bytes),
        f"{found.utilization:.1%}",
        counted(86400 * rate),
    )
    return (*words, f"{price * found.world * 1e9 / rate / 3600:.4g}") if price else words
