"""`pfeife compare`: many plans of a step side by side."""

import argparse
import csv
import io
import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from pfeife.commands.answers import deliver, in_a_line, writable
from pfeife.commands.arguments import plan_arguments, step_arguments

if TYPE_CHECKING:
    from pfeife.commands.programs import Captures

HELP = "plan a step in many ways (lists with commas), and say which is best"
EXAMPLES = """\
examples:
  which schedule, on how many ranks?
    pfeife compare train.py:example --machine h100-sxm --ranks 4,8 --microbatches 16,32 \\
      --schedule 1f1b,interleaved,zb-h1
  which links, or how many nodes?
    pfeife compare config.json --ranks 16 --microbatches 32 --nodes 2,4 --inside nvlink4 \\
      --between ib-ndr,25GB/s,20us
  which machine?
    pfeife compare config.json --batch 32 --ranks 8 --microbatches 32 --precision bf16 \\
      --machine a100-sxm-80gb,h100-sxm,h200-sxm,b200-hgx --optimizer AdamW

A row a plan, the fastest first; `best` marks the fastest, and the one with most tokens (or samples)
a second and rank. What cannot be planned stands below, with the reason."""
_AXES = ("machine", "ranks", "replicas", "microbatches", "schedule")  # which are always shown
_LINKS, _DECIDED = ("nodes", "inside", "between"), ("recompute", "data_parallel", "cut_at")
_MORE = (*_LINKS, "memory", "batch", "sequence", "stages", "optimizer", *_DECIDED)


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

    @property
    def said(self) -> str:
        """Its choices and its step, in a line."""
        words = ", ".join(
            f"{name} {choice}" for name, choice in self.choices.items() if choice is not None
        )
        return f"{words}: {self.refused or f'{self.step_seconds:.4g} s'}"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pfeife compare`."""
    step_arguments(parser, lists=True)
    plan_arguments(parser, lists=True)
    parser.add_argument(
        "--sort", choices=("step", "rate"), default="step", help="rate: tokens a second and rank"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - is the output")
    parser.add_argument("--csv", metavar="FILE", help="write the rows as CSV; - is the output")


def run(options: argparse.Namespace) -> str:
    """The table of all plans."""
    import logging

    from pfeife.commands.programs import changed, opened
    from pfeife.data.progress import shown

    writable(options.json, options.csv)
    options, captures = opened(options)
    all_choices = _choices(options)
    rows = []
    log = logging.getLogger("pfeife")
    with shown(log).phase("comparing") as phase:
        for done, choices in enumerate(all_choices, 1):
            rows.append(_planned(choices, changed(options, **choices), captures))
            if phase.progress:
                phase.progress(done, len(all_choices))
            else:
                log.info("%d of %d: %s", done, len(all_choices), rows[-1].said)
    rows.sort(key=lambda row: (bool(row.refused), _order(row, options.sort)))
    text = f"{_table(rows)}\n\nasked   {options.typed}"
    return deliver(options, data=_json(rows), rows=_csv(rows), text=text)


def _order(row: Row, how: str) -> float:
    return row.step_seconds if how == "step" else -row.each


def _choices(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What each plan is asked for: all combinations, but nothing is between the nodes of one."""
    axes = (*_AXES, *_MORE)
    lists = [getattr(options, axis) or (None,) for axis in axes]
    # An option without a list has one entry, so that the product is over all of them alike.
    combinations = [dict(zip(axes, chosen, strict=True)) for chosen in itertools.product(*lists)]
    # With one node the links between nodes make no difference: such rows become equal, and a
    # dictionary keeps one of each, in the order of the combinations.
    distinct = [
        choices | {"between": None} if choices["nodes"] == 1 else choices
        for choices in combinations
    ]
    return list({tuple(choices.values()): choices for choices in distinct}.values())


def _planned(choices: dict[str, Any], options: argparse.Namespace, captures: "Captures") -> Row:
    """One of the plans, for the options with its choices."""
    from pfeife.commands.plan import question_of
    from pfeife.forecasting import answer

    try:
        question = question_of(options)  # before a capture, which what cannot be needs none of
        figures = answer(captures.of(options).program, question).forecast
    except ValueError as error:
        return Row(choices, refused=in_a_line(error))
    return Row(
        choices,
        figures.step_seconds,
        figures.tokens_per_second or figures.samples_per_second,
        figures.utilization,
        figures.bubble,
        figures.peak_bytes,
    )


def _table(rows: Sequence[Row]) -> str:
    from pfeife.data.units import count, size
    from pfeife.report import table

    good = [row for row in rows if not row.refused]
    # A column that says the same in every row would only make the table wide.
    several = [axis for axis in _MORE if len({row.choices[axis] for row in rows}) > 1]
    axes = (*_AXES, *several)
    fastest = min(good, key=lambda row: row.step_seconds, default=None)
    dense = max(good, key=lambda row: row.each, default=None)
    shown = [
        (
            *(_shown(row.choices[axis]) for axis in axes),
            f"{row.step_seconds:.4g} s",
            count(row.per_second),
            count(row.each),
            f"{row.utilization:.1%}",
            f"{row.bubble:.1%}",
            size(row.peak_bytes),
            " ".join(word for word, best in (("step", fastest), ("rate", dense)) if best is row),
        )
        for row in good
    ]
    head = (*axes, "step", "rate/s", "a rank", "MFU", "bubble", "peak", "best")
    text = table(shown, head) if shown else "none of them can be planned"
    refused = [
        # What to do instead is longer than a column, and depends on the one plan.
        (*(_shown(row.choices[axis]) for axis in axes), row.refused.partition("; use ")[0])
        for row in rows
        if row.refused
    ]
    return f"{text}\n\n{table(refused, (*axes, 'not planned'))}" if refused else text


def _shown(choice: Any) -> Any:
    return "-" if choice is None else choice


def _flat(row: Row) -> dict[str, Any]:
    figures = attrs.asdict(row)
    return figures.pop("choices") | figures


def _json(rows: Sequence[Row]) -> str:
    return json.dumps([_flat(row) for row in rows], indent=1, allow_nan=False)


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    # All rows have the same fields, those that are refused zeros.
    writer = csv.DictWriter(text, list(_flat(rows[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_flat(row) for row in rows)
    return text.getvalue()
