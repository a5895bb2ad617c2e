"""`pfeife compare`: many plans of a step side by side."""

import argparse
import csv
import io
import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from pfeife.commands.answers import deliver, writable
from pfeife.commands.arguments import plan_arguments, step_arguments

if TYPE_CHECKING:
    from pfeife.commands.side_by_side import Figures

HELP = "plan a step in many ways (lists with commas), and say which is best"
EXAMPLES = """\
examples:
  which schedule, on how many ranks?
    pfeife compare train.py:example --machine h100-sxm --ranks 4,8 --microbatches 16,32 \\
      --schedule 1f1b,interleaved,zb-h1
  which links, or how many nodes?
    pfeife compare config.json --ranks 16 --microbatches 32 --nodes 2,4 --inside nvlink4 \\
      --between ib-ndr,25GB/s,20us
  how many ranks share each stage?
    pfeife compare config.json --ranks 16 --microbatches 32 --members 1,2,4,8 --precision bf16
  which machine?
    pfeife compare config.json --batch 32 --ranks 8 --microbatches 32 --precision bf16 \\
      --machine a100-sxm-80gb,h100-sxm,h200-sxm,b200-hgx --optimizer AdamW

A row a plan, the fastest first; `best` marks the fastest, and the one with most tokens (or samples)
a second and rank. What cannot be planned stands below, with the reason."""
_AXES = ("machine", "ranks", "replicas", "microbatches", "schedule")  # which are always shown
_LINKS = ("nodes", "ranks_per_node", "inside", "between")
_DECIDED = ("recompute", "data_parallel", "cut_at")
_CUT = ("members", "parallel", "attention")  # inside of a stage
_MORE = (*_LINKS, *_CUT, "memory", "batch", "sequence", "stages", "optimizer", *_DECIDED)


@attrs.frozen
class Row:
    """One of the plans: its choices, and its figures; or the reason that there is none."""

    choices: dict[str, Any]
    figures: "Figures"

    @property
    def each(self) -> float:
        """Tokens or samples a second and rank."""
        return self.figures.per_second / self.choices["ranks"]

    def said(self, differing: Sequence[str]) -> str:
        """The choices in which rows differ, and its step, in a line."""
        words = ", ".join(f"{name} {self.choices[name]}" for name in differing)
        return f"{words}: {self.figures.refused or f'{self.figures.step_seconds:.4g} s'}"


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
    from pfeife.commands.side_by_side import each_planned
    from pfeife.data.progress import shown

    writable(options.json, options.csv)
    options, captures = opened(options)
    all_choices = _choices(options)
    differing = _differing(all_choices, (*_AXES, *_MORE))
    rows = []
    log = logging.getLogger("pfeife")
    with shown(log).phase("comparing") as phase:
        questions = [changed(options, **choices) for choices in all_choices]
        for done, (number, figures) in enumerate(each_planned(captures, questions), 1):
            rows.append(Row(all_choices[number], figures))
            if phase.progress:
                phase.progress(done, len(all_choices))
            else:
                log.info("%d of %d: %s", done, len(all_choices), rows[-1].said(differing))
    rows.sort(key=lambda row: (bool(row.figures.refused), _order(row, options.sort)))
    text = f"{_table(rows)}\n\nasked   {options.typed}"
    return deliver(options, data=_json(rows), rows=_csv(rows), text=text)


def _order(row: Row, how: str) -> float:
    return row.figures.step_seconds if how == "step" else -row.each


def _choices(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What each plan is asked for: all combinations, but nothing is between the nodes of one."""
    axes = (*_AXES, *_MORE)
    lists = [getattr(options, axis) or (None,) for axis in axes]
    # An option without a list has one entry, so that the product is over all of them alike.
    combinations = [dict(zip(axes, chosen, strict=True)) for chosen in itertools.product(*lists)]
    # With one node the links between nodes make no difference: such rows become equal, and a
    # dictionary keeps one of each, in the order of the combinations.
    distinct = [
        choices | {"between": None} if _is_one_node(choices) else choices
        for choices in combinations
    ]
    return list({tuple(choices.values()): choices for choices in distinct}.values())


def _differing(choices: Sequence[dict[str, Any]], axes: Sequence[str]) -> list[str]:
    return [axis for axis in axes if len({each[axis] for each in choices}) > 1]


def _is_one_node(choices: dict[str, Any]) -> bool:
    ranks, nodes = choices["ranks"], choices["nodes"]
    return nodes == 1 and (choices["ranks_per_node"] or ranks) >= ranks


def _table(rows: Sequence[Row]) -> str:
    from pfeife.data.units import count, size
    from pfeife.report import table

    good = [row for row in rows if not row.figures.refused]
    # A column that says the same in every row would only make the table wide.
    axes = (*_AXES, *_differing([row.choices for row in rows], _MORE))
    fastest = min(good, key=lambda row: row.figures.step_seconds, default=None)
    dense = max(good, key=lambda row: row.each, default=None)
    shown = [
        (
            *(_shown(row.choices[axis]) for axis in axes),
            f"{row.figures.step_seconds:.4g} s",
            count(row.figures.per_second),
            count(row.each),
            f"{row.figures.utilization:.1%}",
            f"{row.figures.bubble:.1%}",
            size(row.figures.peak_bytes),
            " ".join(word for word, best in (("step", fastest), ("rate", dense)) if best is row),
        )
        for row in good
    ]
    head = (*axes, "step", "rate/s", "a rank", "MFU", "bubble", "peak", "best")
    text = table(shown, head) if shown else "none of them can be planned"
    refused = [
        # What to do instead is longer than a column, and depends on the one plan.
        (*(_shown(row.choices[axis]) for axis in axes), row.figures.refused.partition("; use ")[0])
        for row in rows
        if row.figures.refused
    ]
    return f"{text}\n\n{table(refused, (*axes, 'not planned'))}" if refused else text


def _shown(choice: Any) -> Any:
    return "-" if choice is None else choice


def _flat(row: Row) -> dict[str, Any]:
    return row.choices | attrs.asdict(row.figures)


def _json(rows: Sequence[Row]) -> str:
    return json.dumps([_flat(row) for row in rows], indent=1, allow_nan=False)


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    # All rows have the same fields, those that are refused zeros.
    writer = csv.DictWriter(text, list(_flat(rows[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_flat(row) for row in rows)
    return text.getvalue()
