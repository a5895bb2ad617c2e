"""What ranks do over time: a row a rank, predicted and measured on one clock."""

from collections.abc import Mapping, Sequence
from typing import Any

from pfeife.data.timeline import Timeline
from pfeife.report.page.elements import Html, table
from pfeife.report.page.figures import figure, line
from pfeife.report.run import Run
from pfeife.report.spans import COMPUTES, Span, What, idle, spans

Sides = Sequence[tuple[str, Run]]
_HATCHES = {  # beside the colours
    What.BACKWARD: "/",
    What.INPUT_BACKWARD: "\\",
    What.WEIGHT_BACKWARD: "x",
    What.RECEIVE: "|",
    What.REDUCE: "-",
    What.UNSHARD: "+",
    What.WAIT: ".",
}
_HALF = {  # of a row
    What.WAIT: 0.12,
    What.SEND: 0.55,
    What.RECEIVE: 0.55,
    What.REDUCE: 0.35,
    What.UNSHARD: 0.35,
}
_MANY = 2_000  # spans of a run
_LETTERED = 700  # computations that are numbered by their microbatches


def ticks(ranks: Sequence[int], labels: Mapping[int, str]) -> dict[str, Any]:
    """An axis with a row for each rank, the first above, and what is said of some of them."""
    return {
        "range": [len(ranks) - 0.4, -0.6],
        "tickvals": list(range(len(ranks))),
        "ticktext": [f"rank {rank}{labels.get(rank, '')}" for rank in ranks],
        "showgrid": False,
        "fixedrange": True,
    }


def timelines(sides: Sides) -> Html | None:
    """The rows of all ranks, and a table of what they wait."""
    if not sides:
        return None
    shares = {name: idle(run.timeline) for name, run in sides}
    ranks = sorted({rank for by_rank in shares.values() for rank in by_rank})
    rows = [
        (rank, *(f"{100 * by_rank.get(rank, 1.0):.1f} %" for by_rank in shares.values()))
        for rank in ranks
    ]
    head = ("rank", *(f"computes nothing, {name}" for name in shares))
    return table(rows, head, "Bubble of each rank, as a share of the step")


def timeline_figure(sides: Sides) -> Any:
    """A figure with a row a rank, in which what was predicted is above what was measured; None
    where nothing ran."""
    if not sides:
        return None
    ranks = sorted({event.rank for _, run in sides for event in run.timeline.events})
    rows = {rank: row for row, rank in enumerate(ranks)}
    traces: list[dict[str, Any]] = []
    for (side, run), (middle, half) in zip(sides, _places(len(sides)), strict=True):
        run_spans = spans(run.timeline)
        for what in What:
            kind_spans = [span for span in run_spans if span.what == what]
            if kind_spans:
                height = half * _HALF.get(what, 1.0)
                place = {"side": side, "low": middle - height, "high": middle + height}
                # One entry in the legend for a kind, which hides it in all runs.
                is_first = all(trace.get("name") != what for trace in traces)
                trace = _trace(what, kind_spans, rows, is_many=len(run_spans) > _MANY)
                traces.append(trace | {"meta": place, "showlegend": is_first})
        if run.path is not None:
            traces += _path(run.path, rows, middle - 0.75 * half)
        traces += _numbers(run_spans, rows, middle, 0.011 * whole(sides))
    return figure(
        traces,
        f"Timeline of {len(ranks)} ranks, {' and '.join(side for side, _ in sides)}",
        **clock(sides, height=len(ranks) * (26 if len(sides) == 1 else 44)),
        hovermode=False,
        yaxis=ticks(ranks, _bubbles(sides)),
    )


def clock(sides: Sides, height: int) -> dict[str, Any]:
    """What timeline and memory have in common: above one another, they have one clock."""
    return {
        "height": 134 + height,
        "margin": {"l": 150, "r": 10, "t": 44, "b": 40},
        "xaxis": {"title": {"text": "ms"}, "range": [0, whole(sides)]},
        "legend": {"orientation": "h", "y": 1, "yanchor": "top", "yref": "container", "x": 0},
    }


def _bubbles(sides: Sides) -> dict[int, str]:
    """By ranks, their bubbles in brackets."""
    # Both sides in one pair of brackets, in the order in which they are drawn.
    percents: dict[int, list[str]] = {}
    for _, run in sides:
        for rank, share in idle(run.timeline).items():
            percents.setdefault(rank, []).append(f"{100 * share:.0f}")
    return {rank: f" ({', '.join(shares)} %)" for rank, shares in percents.items()}


def _places(count: int) -> list[tuple[float, float]]:
    """The middle of each side in a row, and half of its height."""
    # Rows are 1 apart, and y goes down the page:
    #
    #     row 0 - 0.22   [ F0 ][ F1 ]   predicted
    #     row 0 + 0.22   [ F0 ][ F1 ]   measured
    #     row 1 - 0.22         [ F0 ]   predicted
    return [(0.0, 0.42)] if count == 1 else [(-0.22, 0.2), (0.22, 0.2)]


def ms(seconds: float) -> float:
    """Seconds in ms, with as many digits as a drawing needs."""
    return float(f"{1e3 * seconds:.7g}")


def whole(sides: Sides) -> float:
    """The ms of the longest run, never 0."""
    return ms(max((run.timeline.seconds for _, run in sides), default=0.0)) or 1.0


def _trace(
    what: What, kind_spans: Sequence[Span], rows: Mapping[int, int], *, is_many: bool
) -> dict[str, Any]:
    """The spans of one kind: each with its start and end in ms, row, rank and action, from which
    page.js makes corners and says what is under the pointer."""
    # plotly's own bars, an element each, take seconds for some thousands; polygons of one element
    # take none, but plotly does not tell which of them is pointed at.
    hatch = {"fgcolor": "rgba(0,0,0,.45)", "bgcolor": what.colour, "size": 5, "solidity": 0.25}
    fill = {"fillpattern": {**hatch, "shape": _HATCHES[what]}} if what in _HATCHES else {}
    return {
        "type": "scatter",
        # The outlines of many would hide their colours.
        "mode": "none" if is_many else "lines",
        "name": what.value,
        "legendgroup": what.value,
        "customdata": [
            (ms(span.start), ms(span.end), rows[span.rank], span.rank, str(span.action))
            for span in sorted(kind_spans, key=lambda span: (span.rank, span.start))
        ],
        "fill": "toself",
        "fillcolor": what.colour,
        "line": {"width": 0.4, "color": "rgba(0,0,0,.55)", "simplify": False},
        **fill,
    }


def _path(path: Timeline, rows: Mapping[int, int], height: float) -> list[dict[str, Any]]:
    """What the step waits for, as a line through the rows, above the numbers."""
    events = [event for event in path.events if event.end > event.start]
    x = [ms(moment) for event in events for moment in (event.start, event.end)]
    y = [rows[event.rank] + height for event in events for _ in range(2)]
    # White under black, so that it is seen on any colour; the legend has it once.
    path_traces = [
        line("critical path", x, y, width=width, color=colour) | {"legendgroup": "critical path"}
        for width, colour in ((4.5, "#ffffff"), (2, "#000000"))
    ]
    return [path_traces[0] | {"showlegend": False}, path_traces[1]]


def _numbers(
    run_spans: Sequence[Span], rows: Mapping[int, int], middle: float, room: float
) -> list[dict[str, Any]]:
    """The microbatches, where there is room for them (in ms); page.js hides them where the
    narrowest, `meta`, has no room for two digits."""
    # More numbers than that are too many elements for a page that shall load at once.
    numbered = [
        span for span in run_spans if span.what in COMPUTES and ms(span.end - span.start) > room
    ]
    if not numbered or len(numbered) > _LETTERED:
        return []
    return [
        {
            "type": "scatter",
            "mode": "text",
            "x": [ms((span.start + span.end) / 2) for span in numbered],
            "y": [rows[span.rank] + middle for span in numbered],
            "text": [str(span.action.microbatch) for span in numbered],
            "textfont": {"size": 10, "color": "#000000"},
            "meta": min(ms(span.end - span.start) for span in numbered),
            "showlegend": False,
        }
    ]
