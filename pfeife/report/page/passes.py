"""The programs on the way, one after another: what each pass has changed."""

import difflib
from collections.abc import Iterator, Sequence

from pfeife.passes.compose import Recorded
from pfeife.report.page.elements import Html, lines, table, tag

MOST = 3_000  # lines of one program that are shown


def passes(history: Sequence[Recorded]) -> Html | None:
    """A table of the passes, and a tab for each with what it has changed."""
    if not history:
        return None
    texts = [_text(one) for one in history]
    rows = [
        (
            index,
            one.maker,
            len(one.program.module.graph.nodes),
            len(one.program.calls),
            one.program.units or "",
            len(text),
        )
        for index, (one, text) in enumerate(zip(history, texts, strict=True))
    ]
    head = ("", "pass", "nodes of the graph", "calls", "units", "printed lines")
    found = table(rows, head, "Programs, each made of the one before")
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
            tag("pre", *_difference(texts[at - 1] if at else None, texts[at]), tabindex=0),
            role="tabpanel",
            id=f"pass-{at}",
            aria_labelledby=f"tab-{at}",
            hidden=at > 0,
        )
        for at in range(len(history))
    ]
    bar = tag("div", *tabs, class_="tabs", role="tablist", aria_label="Passes")
    keys = tag("p", "The arrow keys left and right step through the passes.", class_="soft keys")
    return lines([found, keys, bar, *panels])


def _text(one: Recorded) -> list[str]:
    """A printed program without lines that change with every node: those of the model."""
    every = (line.rstrip() for line in str(one.program).splitlines())
    return [one for one in every if one and not one.lstrip().startswith(("# File:", "# No stack"))]


def _difference(before: list[str] | None, after: list[str]) -> Iterator[Html]:
    """The first program whole; of the others what differs, with three lines around it."""
    if before is None:
        found = [("", line) for line in after]
    elif before == after:
        found = [("left", "nothing has changed in the printed program")]
    elif len(before) + len(after) > 8 * MOST:
        found = [
            ("left", "too long to be compared: the program as it is"),
            *(("", a) for a in after),
        ]
    else:
        found = [
            ("left" if line[0] == "@" else _CLASSES.get(line[0], ""), line)
            for line in difflib.unified_diff(before, after, lineterm="", n=3)
            if not line.startswith(("---", "+++"))
        ]
    for class_, line in found[:MOST]:
        yield tag("span", line, class_=class_ or None)
    if len(found) > MOST:
        yield tag("span", f"and {len(found) - MOST} lines more", class_="left")


_CLASSES = {"+": "added", "-": "removed"}
