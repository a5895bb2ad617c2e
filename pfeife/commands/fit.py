"""`pfeife fit`: the fewest ranks that hold a step, and the largest batch and sequence that fit."""

import argparse
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import attrs

from pfeife.commands.answers import in_a_line
from pfeife.commands.arguments import count, plan_arguments, step_arguments

if TYPE_CHECKING:
    from pfeife.commands.programs import Captures
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


Attempt = Callable[[int], "Forecast | str"]  # a plan's forecast, or why memory refuses it


@attrs.frozen
class Fits:
    """What fits, in words, its forecast, and what keeps more from fitting, if that was met."""

    what: str
    forecast: "Forecast"
    limit: str


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pfeife fit`."""
    step_arguments(parser)
    plan_arguments(parser, sized=False)
    parser.add_argument(
        "--ranks", type=count, help="of all replicas and members; searched unless given"
    )
    parser.add_argument("--microbatches", type=count, help="of a step; 4 a rank unless given")
    parser.add_argument("--most", type=count, default=4096, help="ranks, rows or tokens x 1024")
    parser.add_argument("--price", type=float, help="of a rank and hour, in any currency")


def run(options: argparse.Namespace) -> str:
    """A line for the fewest ranks, the largest microbatch and the longest sequence."""
    import logging

    from pfeife.commands.programs import changed, opened
    from pfeife.data.units import size
    from pfeife.report import table

    log = logging.getLogger("pfeife")
    options, captures = opened(options)
    options = changed(options, recompute=options.recompute or "auto")

    def planned(**more: int) -> "Forecast | str":
        forecast = _planned(changed(options, **more), captures)
        what = ", ".join(f"{name} {number}" for name, number in more.items())
        fits = forecast if isinstance(forecast, str) else f"{size(forecast.peak_bytes)} a rank"
        log.info("%s: %s", what, fits)
        return forecast

    # The fewest ranks first, or what the ranks there are can hold: all else is doubled from there.
    if options.ranks is None:
        each = options.replicas * options.members
        ranks, first, limit = _fewest(lambda n: planned(ranks=n), each, options.most)
        options = changed(options, ranks=ranks)
        words = f"{ranks} ranks, the fewest"
    else:
        replicas, first, limit = _in_pipelines(lambda n: planned(replicas=n), options)
        options = changed(options, replicas=replicas)
        several = f" in {replicas} pipelines" if replicas > 1 else ""
        words = f"{options.ranks} ranks{several}"
    answers = [Fits(words, first, limit)]
    # A saved program has its rows and tokens for good. Any other is doubled from what `first` is
    # for: one row a microbatch, where no batch is given, and the tokens of its rows.
    if captures.stored is None and options.batch is None:
        microbatches = _microbatches(options)
        rows, largest, limit = _doubled(
            lambda n: planned(batch=n * microbatches), 1, first, options.most
        )
        answers.append(Fits(f"{rows} rows a microbatch, the most", largest, limit))
    if captures.stored is None and first.tokens:
        start, end = first.tokens // first.samples, 1024 * options.most
        tokens, longest, limit = _doubled(lambda n: planned(sequence=n), start, first, end)
        answers.append(Fits(f"{tokens} tokens a row, the most", longest, limit))
    unit = "tokens a day" if first.tokens else "rows a day"
    head = ("fits", "rows", "step", "memory", "MFU", unit)
    rows_of = [_row(answer, options.price) for answer in answers]
    text = table(rows_of, (*head, "cost a billion") if options.price else head)
    limits = [answer.limit for answer in answers if answer.limit]
    none = f"none was met up to --most {options.most}"
    return f"{text}\n\nasked   {options.typed}\nlimit   {[*limits, none][-1]}"


def _microbatches(options: argparse.Namespace) -> int:
    """Those of a step, by its ranks that are not members of one stage unless they are said."""
    return options.microbatches or _PER_RANK * (options.ranks // options.members or 1)


def _planned(options: argparse.Namespace, captures: "Captures") -> "Forecast | str":
    """The forecast that options ask for, or the reason where memory refuses it."""
    from pfeife.commands.plan import answered, question_of
    from pfeife.commands.programs import changed
    from pfeife.sched.cutting.memory_limit import OutOfMemory

    options = changed(options, microbatches=_microbatches(options))
    # What is wrong with the question is said before a capture that takes a minute.
    question = question_of(options)
    try:
        return answered(captures, options, question).forecast
    except OutOfMemory as error:
        return in_a_line(error)


def _in_pipelines(attempt: Attempt, options: argparse.Namespace) -> "tuple[int, Forecast, str]":
    """The fewest pipelines that hold the step, one where its ranks do, with its forecast and the
    last reason why fewer do not. Raises ValueError if none do."""
    from pfeife.sched.cutting.memory_limit import TooManyStages

    # A pipeline alone is tried first: with more of them each has fewer ranks for the same model.
    counts = [n for n in _doubles(1, options.ranks) if options.ranks % (n * options.members) == 0]
    reason, last = "", ""  # of the fewest pipelines, which need least; and of the most
    for replicas in counts if options.replicas == 1 else [options.replicas]:
        try:
            forecast = attempt(replicas)
        except TooManyStages as error:  # with more pipelines each has fewer ranks, so go on
            reason = reason or str(error)
            continue
        if not isinstance(forecast, str):
            return replicas, forecast, last
        reason, last = reason or forecast, forecast
    raise ValueError(f"{options.what} does not fit on {options.ranks} ranks: {reason}")


def _fewest(attempt: Attempt, each: int, most: int) -> "tuple[int, Forecast, str]":
    """The fewest ranks that hold a step, by `each` so many, with its forecast and the last reason
    why fewer do not: doubled until they do, and then between. Raises ValueError if the most do
    not."""
    from pfeife.sched.cutting.memory_limit import TooManyStages

    high, best, reason = 0, None, ""
    # Twice as many until they do, and then half of what is left between:
    #
    #     ranks     1    2    4    8    16        8 .. 16: 12, then 10 or 14, ...
    #     fit it    no   no   no   no   yes       low      high
    for ranks in _doubles(each, most):
        try:
            forecast = attempt(ranks)
        except TooManyStages as error:
            raise ValueError(
                f"it does not fit on {ranks // 2} ranks, and cannot be cut for more: {error}; take "
                "fewer rows or tokens a microbatch"
            ) from error
        if not isinstance(forecast, str):
            high, best = ranks, forecast
            break
        reason = forecast
    if best is None:
        raise ValueError(f"it does not fit on {most} ranks (--most)")
    low = high // 2  # from here on `high` ranks hold it and `low` ranks do not
    while high - low > each:
        middle = (low + high) // each // 2 * each
        forecast = attempt(middle)
        if isinstance(forecast, str):
            low, reason = middle, forecast
        else:
            high, best = middle, forecast
    return high, best, reason


def _doubled(
    attempt: Attempt, number: int, forecast: "Forecast", most: int
) -> "tuple[int, Forecast, str]":
    """The largest double of a number that fits, itself if no other, with its forecast and the
    reason why the next one does not."""
    for double in _doubles(2 * number, most):
        larger = attempt(double)
        # More rows or tokens need more: what comes after the first that does not fit cannot.
        if isinstance(larger, str):
            return number, forecast, larger
        number, forecast = double, larger
    return number, forecast, ""


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
    # Of all ranks, for 1e9 tokens or rows.
    cost = price * forecast.world * 1e9 / rate / 3600 if rate else 0.0
    return (*words, f"{cost:.4g}")
