"""The programs on the way, one after another: what each pass has changed."""

import itertools
from collections.abc import Iterator, Sequence

from pfeife.data import units
from pfeife.ir.program import Program
from pfeife.passes.changes import difference
from pfeife.passes.compose import Recorded
from pfeife.report.page.elements import Html, lines, table, tag

MOST = 3_000  # lines of one pass that are shown
TOO_LONG = 40_000  # nodes of two programs, beyond which comparing their texts takes minutes


def passes(history: Sequence[Recorded]) -> Html | None:
    """A table of the passes, and a tab for each with what it has changed."""
    if not history:
        return None
    rows = [_row(index, one) for index, one in enumerate(history)]
    head = ("", "pass", "operations", "FLOP", "calls", "most across a cut", "time")
    found = table(rows, head, "Programs of a microbatch, each made of the one before")
    tabs = [
        tag(
            "button",
            one.maker,
            type="button",
            role="tab",
            id=f"tab-{at}",
            aria_controls=f"pass-{at}",
            aria_selected="true" if at == 0 else "false",
            tabindex=0 if at == 0 else -1,
        )
        for at, one in enumerate(history)
    ]
    panels = [
        tag(
            "div",
            tag(
                "pre",
                *_difference(history[at - 1].program if at else None, one.program),
                tabindex=0,
            ),
            role="tabpanel",
            id=f"pass-{at}",
            aria_labelledby=f"tab-{at}",
            hidden=at > 0,
        )
        for at, one in enumerate(history)
    ]
    bar = tag("div", *tabs, class_="tabs", role="tablist", aria_label="Passes")
    keys = tag("p", "The arrow keys left and right step through the passes.", class_="soft keys")
    return lines([found, keys, bar, *panels])


def _row(index: int, one: Recorded) -> tuple[object, ...]:
    """The figures of a program."""
    found = one.totals
    calls = " ".join(f"{count}{kind}" for kind, count in found.calls.items())
    cut = units.size(max(found.cuts)) if found.cuts else ""
    seconds = "" if found.seconds is None else units.duration(found.seconds)
    return index, one.maker, found.operations, units.flops(found.flops), calls, cut, seconds


def _difference(before: Program | None, after: Program) -> Iterator[Html]:
    """The first program whole; of the others what differs, with three lines around it."""
    if before is None:
        found = [("", line) for line in str(after).splitlines()]
    elif _length(before) + _length(after) > TOO_LONG:
        found = [("left", "too long to be compared")]
    else:
        found = [
            ("left" if line[0] == "@" else _CLASSES.get(line[0], ""), line)
            for line in difference(before, after).splitlines()[2:]
        ] or [("left", "nothing has changed in the printed program")]
    for class_, group in itertools.groupby(found[:MOST], key=lambda one: one[0]):
        yield tag("span", "\n".join(line for _, line in group), class_=class_ or None)
    if len(found) > MOST:
        yield tag("span", f"and {len(found) - MOST} lines more", class_="left")


_CLASSES = {"+": "added", "-": "removed"}


def _length(program: Program) -> int:
    """How many nodes there are in all graphs."""
    graphs = [program.module.graph, *(program.body(call).graph for call in program.calls)]
    return sum(len(graph.nodes) for graph in graphs)
