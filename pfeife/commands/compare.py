"""`pfeife compare`: many plans of a step side by side."""

import argparse
import csv
import io
import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import attrs

from pfeife.commands.words import plan_arguments, step_arguments

HELP = "plan a step in many ways (lists with commas), and say which is best"
EXAMPLES = """\
examples:
  which schedule, on how many ranks?
    pfeife compare train.py:example --machine h100-sxm --ranks 4,8 --microbatches 16,32 \\
      --schedule 1f1b,interleaved,zb-h1
  which machine?
    pfeife compare config.json --batch 32 --ranks 8 --microbatches 32 --precision bf16 \\
      --machine a100-sxm-80gb,h100-sxm,h200-sxm,b200-hgx --optimizer AdamW

A row a plan, the fastest first; `best` marks the fastest, and the one with most tokens (or samples)
a second and rank. What cannot be planned stands below, with the reason."""
_AXES = ("machine", "ranks", "replicas", "microbatches", "schedule")


@attrs.frozen
class Row:
    """One of the plans: its choices, and its figures; or the reason that there is none."""

    choices: dict[str, Any]
    step_seconds: float = 0.0
    per_second: float = 0.0
    utilization: float = 0.0
    bubble: float = 0.0
    peak_bytes: int = 0
    refused: str = ""

    @property
    def each(self) -> float:
        """Tokens or samples a second and rank."""
        return self.per_second / self.choices["ranks"]


def arguments(parser: argparse.ArgumentParser) -> None:
    step_arguments(parser)
    plan_arguments(parser, lists=True)
    parser.add_argument(
        "--sort", choices=("step", "rate"), default="step", help="rate: tokens a second and rank"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - is the output")
    parser.add_argument("--csv", metavar="FILE", help="write the rows as CSV; - is the output")


def run(given: argparse.Namespace) -> str:
    """The table of all plans."""
    import logging

    from pfeife.commands.plan import writable, write
    from pfeife.commands.programs import saved, with_precision
    from pfeife.data.progress import shown

    writable(given.json, given.csv)
    stored = saved(given.what)
    given = with_precision(given, stored)
    every = [
        dict(zip(_AXES, chosen, strict=True))
        for chosen in itertools.product(*(getattr(given, axis) for axis in _AXES))
    ]
    programs: dict[int, Any] = {}
    rows = []
    with shown(logging.getLogger("pfeife")).phase("comparing") as phase:
        for done, choices in enumerate(every):
            rows.append(_planned(given, choices, programs, stored))
            if phase.progress:
                phase.progress(done + 1, len(every))
    rows.sort(key=lambda row: (bool(row.refused), _order(row, given.sort)))
    data, text = _json(rows), _csv(rows)
    if given.json not in (None, "-"):
        write(given.json, data)
    if given.csv not in (None, "-"):
        write(given.csv, text)
    if "-" in (given.json, given.csv):
        return data if given.json == "-" else text.rstrip("\n")
    return f"{_table(rows)}\n\nasked   {given.typed}"


def _order(row: Row, how: str) -> float:
    return row.step_seconds if how == "step" else -row.each


def _planned(
    given: argparse.Namespace, choices: dict[str, Any], programs: dict[int, Any], stored: Any
) -> Row:
    """One of the plans; programs are captured once for a size of the microbatch."""
    from pfeife.commands.plan import question_of
    from pfeife.commands.programs import program_of
    from pfeife.forecasting import Question, forecast

    count = choices["microbatches"]
    rows = given.batch / count if given.batch else 1.0
    try:
        question = question_of(given, **choices)
        Question(**question)  # what is wrong is said before a capture
        if rows not in programs:
            programs[rows] = program_of(given, count, stored).program  # type: ignore[index]
        found = forecast(programs[rows], **question).forecast  # type: ignore[index]
    except ValueError as error:
        return Row(choices, refused=" ".join(str(error).split()))
    return Row(
        choices,
        found.step_seconds,
        found.tokens_per_second or found.samples_per_second,
        found.utilization,
        found.bubble,
        found.peak_bytes,
    )


def _table(rows: Sequence[Row]) -> str:
    from pfeife.data.units import count, size
    from pfeife.report import table

    good = [row for row in rows if not row.refused]
    fastest = min(good, key=lambda row: row.step_seconds, default=None)
    dense = max(good, key=lambda row: row.each, default=None)
    shown = [
        (
            *(row.choices[axis] for axis in _AXES),
            f"{row.step_seconds:.4g} s",
            count(row.per_second),
            count(row.each),
            f"{row.utilization:.1%}",
            f"{row.bubble:.1%}",
            size(row.peak_bytes),
            " ".join(word for word, one in (("step", fastest), ("rate", dense)) if one is row),
        )
        for row in good
    ]
    head = (*_AXES, "step", "rate/s", "a rank", "MFU", "bubble", "peak", "best")
    text = table(shown, head) if shown else "none of them can be planned"
    refused = [
        (*(row.choices[axis] for axis in _AXES), _word(row.refused)) for row in rows if row.refused
    ]
    return f"{text}\n\n{table(refused, (*_AXES, 'not planned'))}" if refused else text


def _word(reason: str) -> str:
    """A refusal in a few words."""
    if "bytes" in reason and re.search("limit|fits|memory|machine", reason):
        return f"memory: {reason[:100]}"
    return reason[:100]


def _flat(row: Row) -> dict[str, Any]:
    figures = attrs.asdict(row)
    return figures.pop("choices") | figures


def _json(rows: Sequence[Row]) -> str:
    return json.dumps([_flat(row) for row in rows], indent=1, allow_nan=False)


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    made = csv.DictWriter(text, list(_flat(rows[0])), lineterminator="\n")
    made.writeheader()
    made.writerows(_flat(row) for row in rows)
    return text.getvalue()
