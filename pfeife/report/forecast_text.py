"""The forecast of a plan as people read it, and as a table for other programs."""

import csv
import io
import re
from collections.abc import Mapping, Sequence

import attrs

from pfeife.data.advice import advice
from pfeife.data.forecast import Forecast, StageForecast
from pfeife.data.units import count
from pfeife.report.tables import size, table


def forecast_table(forecast: Forecast, width: int = 1000) -> str:
    """A row a stage, a row a rank, and what it comes to; the tables are at most so many letters
    wide where that can be: then paths are shortened, and the smallest of the ranks' bytes added
    up."""
    has_members = any(stage.telling_seconds for stage in forecast.stages)
    head = ["stage", "rank", "from", "to", "parameters", "forward", "backward", "sends"]
    head += ["members wait"] if has_members else []
    stages = [
        (
            stage.stage,
            stage.rank,
            stage.first,
            stage.last,
            f"{count(stage.parameters)} ({size(stage.parameter_bytes)})",
            f"{1e3 * stage.forward_seconds:.2f} ms",
            f"{1e3 * stage.backward_seconds:.2f} ms",
            size(stage.sent_bytes),
            *([f"{1e3 * stage.telling_seconds:.2f} ms"] if has_members else []),
        )
        for stage in forecast.stages
    ]
    parts = [_narrowed(stages, head, width), _ranks(forecast, width), forecast_summary(forecast)]
    return "\n\n".join(parts)


def _narrowed(rows: Sequence[Sequence[object]], head: Sequence[str], width: int) -> str:
    """A table of stages whose paths end early where it is too wide."""
    longest = max((len(str(path)) for row in rows for path in row[2:4]), default=0)
    text = table(rows, head)
    # Letter by letter, so that no path loses more than it must.
    while max(map(len, text.splitlines())) > width and longest > 12:
        longest -= 1
        shown = [
            (*row[:2], *(_short(str(path), longest) for path in row[2:4]), *row[4:]) for row in rows
        ]
        text = table(shown, head)
    return text


def _short(path: str, most: int) -> str:
    """A path up to the number of its innermost block, and the end of its last name."""
    if len(path) <= most:
        return path
    # "model.layers.12" says more of "model.layers.12.mlp.down_proj" than its beginning alone.
    block = re.match(r".*\.\d+(?=\.)", path)
    first, last = block[0] if block else path.partition(".")[0], path.rpartition(".")[2]
    last = last[-(most // 3) :]
    room = most - len(last) - 2
    return f"{first if len(first) <= room else '..' + first[2 - room :]}..{last}"


def _ranks(forecast: Forecast, width: int) -> str:
    """A row a rank with the bytes at its peak; those that are smallest everywhere are added up
    where a table with all of them is too wide."""
    most: dict[str, int] = {}
    for rank_forecast in forecast.by_rank:
        for word, number in rank_forecast.bytes.items():
            most[word] = max(most.get(word, 0), number)
    # The smallest first: what is added up is what a reader misses least.
    small = sorted(most, key=lambda word: most[word])
    # One column alone would only change its name.
    for several in (0, *range(2, len(small) + 1)):
        rest = small[:several]
        words = [word for word in most if word not in rest]
        rows = [
            (
                rank_forecast.rank,
                f"{rank_forecast.computing_seconds:.3g} s",
                f"{rank_forecast.bubble:.1%}",
                *(size(rank_forecast.bytes.get(word, 0)) for word in words),
                *([size(sum(rank_forecast.bytes.get(word, 0) for word in rest))] if rest else []),
                size(rank_forecast.peak_bytes),
            )
            for rank_forecast in forecast.by_rank
        ]
        head = ("rank", "computes", "bubble", *words, *(["rest"] if rest else []), "peak")
        text = table(rows, head)
        if max(map(len, text.splitlines())) <= width:
            break
    notes = [_computing(forecast)]
    if rest:
        listed = ", ".join(word for word in most if word in rest)
        notes.append(f"rest: {listed} (each in --json and --csv)")
    return "\n".join([text, *notes])


def _computing(forecast: Forecast) -> str:
    """What a rank computes in a step, of the seconds that its stages take."""
    microbatches = forecast.microbatches // forecast.replicas
    adding = 1e3 * max((stage.adding_seconds for stage in forecast.stages), default=0.0)
    more = f" + {microbatches - 1} x adding (up to {adding:.3g} ms)" if adding else ""
    return f"computes: {microbatches} x (forward + backward){more}"


def forecast_summary(forecast: Forecast) -> str:
    """Step, rates, utilization, bound, memory, what limits the step and what to do about it, a line
    each."""
    # A model without tokens, such as one of images, has rows alone.
    rate = f"{count(forecast.samples_per_second)} samples/s"
    if forecast.tokens:
        each = forecast.tokens_per_second / forecast.world
        rate = f"{count(forecast.tokens_per_second)} tokens/s ({count(each)} a rank), {rate}"
    sizes = (forecast.replicas, forecast.ranks, forecast.members)
    own = [str(n) for at, n in enumerate(sizes) if n > 1 or at == 1]
    of = " x ".join(own)
    # Such as bf16-mixed.
    kind, _, mixed = forecast.asked.get("precision", "").partition("-")
    kinds = f" in {kind}{', float32 beside it' if mixed else ''}" if kind else ""
    lines = [
        *([("asked", forecast.asked["command"])] if "command" in forecast.asked else []),
        *([("with", _with(forecast.asked))] if forecast.asked else []),
        ("plan", f"{forecast.schedule}, {of} ranks of {forecast.machine}, "
         f"{len(forecast.stages)} stages, {forecast.microbatches} microbatches, "
         f"{count(forecast.parameters)} parameters ({size(forecast.parameter_bytes)}{kinds})"),
        *([("network", forecast.network)] if forecast.network else []),
        *([("cuts", _cuts(forecast.cut_blocks))] if forecast.cut_blocks else []),
        ("step", f"{forecast.step_seconds:.4g} s: {rate}"),
        ("MFU", f"{forecast.utilization:.1%} = {count(forecast.flops)}FLOP / "
         f"({forecast.world} ranks x {count(_peak(forecast))}FLOP/s "
         f"x {forecast.step_seconds:.4g} s)"),
        ("bubble", f"{forecast.bubble:.1%} of the ranks' time"),
    ]  # fmt: skip
    # There is a bound only where the planner has proven one.
    if forecast.gap is not None:
        lines.append(("bound", f"{forecast.bound_seconds:.4g} s for these stages, the step is "
                      f"{forecast.gap:.1%} over it"))  # fmt: skip
    lines.append(("memory", f"{size(forecast.peak_bytes)} on the fullest rank, of "
                  f"{size(forecast.memory_limit)}"))  # fmt: skip
    lines += [("limit", forecast.limited_by), ("advice", advice(forecast))]
    return "\n".join(f"{word:7} {text}" for word, text in lines)


def _with(options: Mapping[str, str]) -> str:
    """What a plan was asked for, in a line."""
    return ", ".join(f"{name} {text}" for name, text in options.items() if name != "command")


def _cuts(blocks: Sequence[str]) -> str:
    """Where stages end inside of blocks, and what keeps them from it."""
    more = f" and {len(blocks) - 1} other blocks" if len(blocks) > 1 else ""
    return f"inside of {blocks[0]}{more}; --cut-at blocks cuts between blocks alone"


def _peak(forecast: Forecast) -> float:
    """Operations per second of a rank at its peak, over the dtypes of the step."""
    return (
        forecast.flops / (forecast.world * forecast.peak_seconds) if forecast.peak_seconds else 0.0
    )


def forecast_csv(forecast: Forecast) -> str:
    """A row a stage, with the figures of its rank beside it."""
    by_rank = {rank_forecast.rank: rank_forecast for rank_forecast in forecast.by_rank}
    words = list(
        dict.fromkeys(word for rank_forecast in forecast.by_rank for word in rank_forecast.bytes)
    )
    # Ranks may hold different kinds of bytes; a column is for all of them, in one order.
    names = [field.name for field in attrs.fields(StageForecast)]
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([*names, "computing_seconds", "bubble", "peak_bytes", *words, *forecast.asked])
    for stage in forecast.stages:
        rank = by_rank[stage.rank]
        rows.writerow(
            [
                *(getattr(stage, name) for name in names),
                rank.computing_seconds,
                rank.bubble,
                rank.peak_bytes,
                *(rank.bytes.get(word, 0) for word in words),
                *forecast.asked.values(),
            ]
        )
    return text.getvalue()
