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
    rows = [_row(index, one) for index, one in enumerate(history)]
    head = ("", "pass", "operations", "FLOP", "calls", "most across a cut", "time")
    found = table(rows, head, "Programs of a microbatch, each made of the one before")
    before = [None, *(one.program for one in history)]
    folds = [
        _fold(f"{at} {one.maker}", _difference(before[at], one.program))
        for at, one in enumerate(history)
    ]
    return lines([found, _SEARCH, *folds])


_SEARCH = tag(
    "p",
    Html('<input id="find" type="search" placeholder="Search the programs" '
         'aria-label="Search the programs" aria-describedby="hits">'),
    tag("output", id="hits", for_="find"),
    tag("small", "Enter and Shift+Enter step through what is found, the arrow keys left and "
        "right through the passes.", class_="soft"),
    class_="find",
)  # fmt: skip


def _fold(name: str, found: Sequence[tuple[str, str]]) -> Html:
    """Lines with their classes under a name, and how many there are."""
    counts = Counter(class_ or "in all" for class_, _ in found)
    shown = [word for word in _CLASSES.values() if word in counts] or ["in all"]
    said = ", ".join(f"{counts[word]} lines {word}" for word in shown if counts[word])
    parts = [
        tag("span", "\n".join(line for _, line in group), class_=class_ or None)
        for class_, group in itertools.groupby(found[:MOST], key=lambda one: one[0])
    ]
    if len(found) > MOST:
        parts.append(tag("span", f"and {len(found) - MOST} lines more", class_="left"))
    summary = tag("summary", name, " ", tag("small", said or "no line changed", class_="soft"))
    return tag("details", summary, tag("pre", *parts, tabindex=0), class_="pass")


def _row(index: int, one: Recorded) -> tuple[object, ...]:
    """The figures of a program."""
    found = one.totals
    calls = " ".join(f"{count}{kind}" for kind, count in found.calls.items())
    cut = units.size(max(found.cuts)) if found.cuts else ""
    seconds = "" if found.seconds is None else units.duration(found.seconds)
    return index, one.maker, found.operations, units.flops(found.flops), calls, cut, seconds


def _difference(before: Program | None, after: Program) -> Sequence[tuple[str, str]]:
    """The first program whole; of the others what differs, with three lines around it. Each line
    after its class."""
    if before is None:
        return [("", line) for line in str(after).splitlines()]
    if _length(before) + _length(after) > TOO_LONG:
        return [("left", "too long to be compared")]
    return [
        ("left" if line[0] == "@" else _CLASSES.get(line[0], ""), line)
        for line in difference(before, after).splitlines()[2:]
    ] or [("left", "nothing has changed in the printed program")]


_CLASSES = {"+": "added", "-": "removed"}


def _length(program: Program) -> int:
    """How many nodes there are in all graphs."""
    graphs = [program.module.graph, *(program.body(call).graph for call in program.calls)]
    return sum(len(graph.nodes) for graph in graphs)
