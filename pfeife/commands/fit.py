"""`pfeife fit`: the fewest ranks that hold a step, and the largest batch and sequence that fit."""

import argparse
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import attrs

from pfeife.commands.arguments import count, plan_arguments, step_arguments

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
otherwise. Ranks are searched to the one, rows of a microbatch and tokens of a row by doubling. If
the --ranks that you have do not hold it as one pipeline, they are tried as several."""
_PER_RANK = 4  # microbatches for each rank, unless they are said


@attrs.frozen
class Fits:
    """What fits, in words, and its forecast."""

    what: str
    forecast: "Forecast"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pfeife fit`."""
    step_arguments(parser)
    plan_arguments(parser, sized=False)
    parser.add_argument("--ranks", type=count, help="of all replicas; searched unless given")
    parser.add_argument("--microbatches", type=count, help="of a step; 4 a rank unless given")
    parser.add_argument("--most", type=count, default=4096, help="ranks, rows or tokens x 1024")
    parser.add_argument("--price", type=float, help="of a rank and hour, in any currency")


def run(options: argparse.Namespace) -> str:
    """A line for the fewest ranks, the largest microbatch and the longest sequence."""
    from pfeife.commands.programs import saved, with_precision
    from pfeife.report import table

    stored = saved(options.what)
    options = with_precision(options, stored)
    options = _with(options, recompute=options.recompute or "auto")
    planned = _Planned(stored)
    if options.ranks is None:
        ranks, first = _fewest(lambda n: planned(_with(options, ranks=n)), options.most)
        options = _with(options, ranks=ranks)
        words = f"{ranks} ranks, the fewest"
    else:
        options, first = _in_pipelines(options, planned)
        several = f" in {options.replicas} pipelines" if options.replicas > 1 else ""
        words = f"{options.ranks} ranks{several}"
    answers = [Fits(words, first)]
    # A saved program has its rows and tokens for good. Any other is doubled from what `first` is
    # for: one row a microbatch, where no batch is given, and the tokens of its rows.
    if stored is None and options.batch is None:
        microbatches = options.microbatches or _PER_RANK * options.ranks
        rows, most = _doubled(
            lambda n: planned(_with(options, batch=n * microbatches)), 1, first, options.most
        )
        answers.append(Fits(f"{rows} rows a microbatch, the most", most))
    if stored is None and first.tokens:
        start, end = first.tokens // first.samples, 1024 * options.most
        tokens, most = _doubled(lambda n: planned(_with(options, sequence=n)), start, first, end)
        answers.append(Fits(f"{tokens} tokens a row, the most", most))
    head = (
        "fits",
        "rows",
        "step",
        "memory",
        "MFU",
        "tokens a day" if first.tokens else "rows a day",
    )
    rows_of = [_row(answer, options.price) for answer in answers]
    text = table(rows_of, (*head, "cost a billion") if options.price else head)
    return f"{text}\n\nasked   {options.typed}\nlimit   {planned.reason or 'none was met'}"


def _in_pipelines(
    options: argparse.Namespace, planned: "_Planned"
) -> "tuple[argparse.Namespace, Forecast]":
    """The options with the fewest pipelines that hold the step, one where its ranks do, and its
    forecast. Raises ValueError if none do."""
    from pfeife.sched.cutting.memory_limit import TooManyStages

    counts = [n for n in _doubles(1, options.ranks) if options.ranks % n == 0]
    reason = ""  # that of the fewest pipelines, which need least
    for replicas in counts if options.replicas == 1 else [options.replicas]:
        candidate = _with(options, replicas=replicas)
        try:
            forecast = planned(candidate)
        except TooManyStages as error:  # with more pipelines each has fewer ranks, so go on
            reason = reason or str(error)
            continue
        if forecast:
            return candidate, forecast
        reason = reason or planned.reason
    raise ValueError(f"{options.what} does not fit on {options.ranks} ranks: {reason}")


class _Planned:
    """Forecasts of a step; None for one that memory refuses, whose `reason` is the last."""

    def __init__(self, stored: Any):
        self.stored, self.reason = stored, ""
        self.programs: dict[Any, Any] = {}

    def __call__(self, options: argparse.Namespace) -> "Forecast | None":
        from pfeife.commands.plan import answered, question_of
        from pfeife.commands.programs import program_of
        from pfeife.sched.cutting.memory_limit import OutOfMemory

        microbatches = options.microbatches or _PER_RANK * options.ranks
        options = _with(options, microbatches=microbatches)
        # A capture depends on the rows of a microbatch and their tokens alone.
        key = (options.batch or microbatches) / microbatches, options.sequence
        if key not in self.programs:
            self.programs[key] = program_of(options, microbatches, self.stored).program
        try:
            return answered(self.programs[key], question_of(options)).forecast
        except OutOfMemory as error:
            self.reason = " ".join(str(error).split())
            return None


def _with(options: argparse.Namespace, **more: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(options), **more})


def _fewest(fits: Callable[[int], "Forecast | None"], most: int) -> "tuple[int, Forecast]":
    """The fewest ranks that hold a step, with its forecast: doubled until they do, and then
    between. Raises ValueError if the most do not."""
    from pfeife.sched.cutting.memory_limit import TooManyStages

    high, best = 0, None
    for ranks in _doubles(1, most):
        try:
            best = fits(ranks)
        except TooManyStages as error:
            raise ValueError(
                f"it does not fit on {ranks // 2} ranks, and cannot be cut for more: {error}; take "
                "fewer rows or tokens a microbatch"
            ) from error
        if best:
            high = ranks
            break
    if best is None:
        raise ValueError(f"it does not fit on {most} ranks (--most)")
    low = high // 2  # from here on `high` ranks hold it and `low` ranks do not
    while high - low > 1:
        middle = (low + high) // 2
        forecast = fits(middle)
        if forecast:
            high, best = middle, forecast
        else:
            low = middle
    return high, best


def _doubled(
    fits: Callable[[int], "Forecast | None"], number: int, forecast: "Forecast", most: int
) -> "tuple[int, Forecast]":
    """The largest double of a number that fits, itself if no other, with its forecast."""
    for double in _doubles(2 * number, most):
        more = fits(double)
        if more is None:
            break
        number, forecast = double, more
    return number, forecast


def _doubles(start: int, most: int) -> Iterator[int]:
    while start <= most:
        yield start
        start *= 2


def _row(answer: Fits, price: float | None) -> tuple:
    from pfeife.data.units import count as counted
    from pfeife.report import size

    forecast = answer.forecast
    rate = forecast.tokens_per_second or forecast.samples_per_second
    words = (
        answer.what,
        forecast.samples,
        f"{forecast.step_seconds:.4g} s",
        size(forecast.peak_bytes),
        f"{forecast.utilization:.1%}",
        counted(86400 * rate),
    )
    if not price:
        return words
    cost = price * forecast.world * 1e9 / rate / 3600 if rate else 0.0
    return (*words, f"{cost:.4g}")
