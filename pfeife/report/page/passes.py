"""The programs on the way, one after another: what each pass has changed."""

import itertools
from collections import Counter
from collections.abc import Sequence

from pfeife.data import units
from pfeife.ir.program import Program
from pfeife.passes.changes import difference
from pfeife.passes.compose import Recorded
from pfeife.report.page.elements import Html, lines, table, tag

MOST = 3_000  # lines of one pass that are shown
TOO_LONG = 40_000  # nodes of two programs, beyond which comparing their texts takes minutes


def passes(history: Sequence[Recorded]) -> Html | None:
    """A table of the passes, a search, and what each has changed, which folds."""
    if not history:
        return None
    rows = [_row(index, recorded) for index, recorded in enumerate(history)]
    head = ("", "pass", "operations", "FLOP", "calls", "most across a cut", "time")
    overview = table(rows, head, "Programs of a microbatch, each made of the one before")
    # The first program is shown whole: nothing was before it.
    before = [None, *(recorded.program for recorded in history)]
    folds = [
        _fold(f"{at} {recorded.maker}", _difference(before[at], recorded.program))
        for at, recorded in enumerate(history)
    ]
    return lines([overview, _SEARCH, *folds])


_SEARCH = tag(
    "p",
    Html('<input id="find" type="search" placeholder="Search the programs" '
         'aria-label="Search the programs" aria-describedby="hits">'),
    tag("output", id="hits", for_="find"),
    tag("small", "Enter and Shift+Enter step through what is found, the arrow keys left and "
        "right through the passes.", class_="soft"),
    class_="find",
)  # fmt: skip


def _fold(name: str, classed_lines: Sequence[tuple[str, str]]) -> Html:
    """Lines with their classes under a name, and how many there are."""
    # Counted are all lines, also those that are not shown.
    counts = Counter(class_ or "in all" for class_, _ in classed_lines)
    shown = [word for word in _CLASSES.values() if word in counts] or ["in all"]
    changes = ", ".join(f"{counts[word]} lines {word}" for word in shown if counts[word])
    parts = [
        tag("span", "\n".join(line for _, line in group), class_=class_ or None)
        for class_, group in itertools.groupby(classed_lines[:MOST], key=lambda pair: pair[0])
    ]
    if len(classed_lines) > MOST:
        parts.append(tag("span", f"and {len(classed_lines) - MOST} lines more", class_="left"))
    summary = tag("summary", name, " ", tag("small", changes or "no line changed", class_="soft"))
    return tag("details", summary, tag("pre", *parts, tabindex=0), class_="pass")


def _row(index: int, recorded: Recorded) -> tuple[object, ...]:
    """The figures of a program."""
    totals = recorded.totals
    calls = " ".join(f"{count}{kind}" for kind, count in totals.calls.items())
    cut = units.size(max(totals.cuts)) if totals.cuts else ""
    seconds = "" if totals.seconds is None else units.duration(totals.seconds)
    return index, recorded.maker, totals.operations, units.flops(totals.flops), calls, cut, seconds


def _difference(before: Program | None, after: Program) -> Sequence[tuple[str, str]]:
    """The first program whole; of the others what differs, with three lines around it. Each line
    after its class."""
    if before is None:
        return [("", line) for line in str(after).splitlines()]
    if _length(before) + _length(after) > TOO_LONG:
        return [("left", "too long to be compared")]
    return [
        ("left" if line[0] == "@" else _CLASSES.get(line[0], ""), line)
        # the first two lines only say which text is which
        for line in difference(before, after).splitlines()[2:]
    ] or [("left", "nothing has changed in the printed program")]


_CLASSES = {"+": "added", "-": "removed"}


def _length(program: Program) -> int:
    """How many nodes there are in all graphs."""
    graphs = [program.module.graph, *(program.body(call).graph for call in program.calls)]
    return sum(len(graph.nodes) for graph in graphs)
