"""What ranks do over time: a row a rank, predicted and measured on one clock."""

from collections.abc import Mapping, Sequence
from typing import Any

from pfeife.data.timeline import Timeline
from pfeife.report.page.elements import Figure, Html, table
from pfeife.report.run import Run
from pfeife.report.spans import COLOURS, COMPUTES, Span, What, idle, spans

Sides = Sequence[tuple[str, Run]]
_HATCHES = {  # beside the colours
    What.BACKWARD: "/",
    What.INPUT_BACKWARD: "\\",
    What.WEIGHT_BACKWARD: "x",
    What.RECEIVE: "|",
    What.REDUCE: "-",
    What.WAIT: ".",
}
_HALF = {What.WAIT: 0.12, What.SEND: 0.55, What.RECEIVE: 0.55, What.REDUCE: 0.35}  # of a row
_MANY = 2_000  # spans of a run
_LETTERED = 700  # computations that are numbered by their microbatches


def ticks(ranks: Sequence[int], labels: Mapping[int, str]) -> dict[str, Any]:
    """An axis with a row for each rank, the first above, and what is said of some of them."""
    return {
        "range": [len(ranks) - 0.4, -0.6],
        "tickvals": list(range(len(ranks))),
        "ticktext": [f"rank {rank}{labels.get(rank, '')}" for rank in ranks],
        "zeroline": False,
        "showgrid": False,
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


def timeline_figure(sides: Sides) -> Figure | None:
    """A row a rank, in which what was predicted is above what was measured."""
    if not sides:
        return None
    ranks = sorted({e.rank for _, run in sides for e in run.timeline.events})
    rows = {rank: row for row, rank in enumerate(ranks)}
    places = _places(len(sides))
    data, drawn = list[dict[str, Any]](), list[dict[str, Any]]()
    for index, (name, run) in enumerate(sides):
        run_spans = sorted(spans(run.timeline), key=lambda span: (span.rank, span.start))
        for what in What:
            kind_spans = [span for span in run_spans if span.what == what]
            if not kind_spans:
                continue
            # One entry in the legend for a kind, which hides it in all runs.
            is_first = all(trace.get("legendgroup") != what for trace in data)
            # page.js gives corners to these traces by the spans in `drawn`: both are in the same
            # order.
            data.append(_trace(what, len(run_spans) > _MANY) | {"showlegend": is_first})
            drawn.append(
                {
                    "side": name,
                    "what": what,
                    "middle": places[index][0],
                    "half": places[index][1] * _HALF.get(what, 1.0),
                    "rows": [rows[span.rank] for span in kind_spans],
                    "starts": [ms(span.start) for span in kind_spans],
                    "ends": [ms(span.end) for span in kind_spans],
                    "actions": [str(span.action) for span in kind_spans],
                }
            )
        if run.path is not None:
            middle, half = places[index]
            data += _path(run.path, rows, middle - 0.75 * half)
        data += _numbers(run_spans, rows, places[index][0], 0.011 * whole(sides))
    label = f"Timeline of {len(ranks)} ranks, {' and '.join(name for name, _ in sides)}"
    height = len(ranks) * (26 if len(sides) == 1 else 44)
    layout = {**layout_of(sides, height), "hovermode": False, "dragmode": "zoom"}
    layout["yaxis"] = {**ticks(ranks, _bubbles(sides)), "fixedrange": True}
    # How wide the narrowest number's box is, from which page.js sees if there is room for two
    # digits.
    numbered = [*(_narrowest(run.timeline, 0.011 * whole(sides)) for _, run in sides)]
    more = {"spans": drawn, "ranks": ranks, "numbered": min(numbered)}
    return Figure("timeline", label, data, layout, more)


def layout_of(sides: Sides, height: int) -> dict[str, Any]:
    """What timeline and memory have in common: above one another, they have one clock."""
    return {
        "height": 134 + height,
        "margin": {"l": 150, "r": 10, "t": 44, "b": 40},
        "xaxis": {"title": {"text": "ms"}, "zeroline": False, "range": [0, whole(sides)]},
        "legend": {"orientation": "h", "y": 1, "yanchor": "top", "yref": "container", "x": 0},
    }


def _bubbles(sides: Sides) -> dict[int, str]:
    """By ranks, their bubbles in brackets."""
    percents: dict[int, list[str]] = {}
    for _, run in sides:
        for rank, share in idle(run.timeline).items():
            percents.setdefault(rank, []).append(f"{100 * share:.0f}")
    return {rank: f" ({', '.join(shares)} %)" for rank, shares in percents.items()}


def _places(count: int) -> list[tuple[float, float]]:
    """The middle of each side in a row, and half of its height."""
    return [(0.0, 0.42)] if count == 1 else [(-0.22, 0.2), (0.22, 0.2)]


def ms(seconds: float) -> float:
    """Seconds in ms, with as many digits as a drawing needs."""
    return float(f"{1e3 * seconds:.7g}")


def whole(sides: Sides) -> float:
    """The ms of the longest run, never 0."""
    return ms(max((run.timeline.seconds for _, run in sides), default=0.0)) or 1.0


def _trace(what: What, is_many: bool) -> dict[str, Any]:
    """The spans of one kind; page.js has their corners. Many have no outline: it would hide their
    colours."""
    hatch = {"fgcolor": "rgba(0,0,0,.45)", "bgcolor": COLOURS[what], "size": 5, "solidity": 0.25}
    fill = {"fillpattern": {**hatch, "shape": _HATCHES[what]}} if what in _HATCHES else {}
    return {
        "type": "scatter",
        "mode": "none" if is_many else "lines",
        "name": what.value,
        "legendgroup": what.value,
        "fill": "toself",
        "fillcolor": COLOURS[what],
        "line": {"width": 0.4, "color": "rgba(0,0,0,.55)", "simplify": False},
        "hoverinfo": "skip",
        **fill,
    }


def _path(path: Timeline, rows: dict[int, int], height: float) -> list[dict[str, Any]]:
    """What the step waits for, as a line through the rows, above the numbers."""
    events = [event for event in path.events if event.end > event.start]
    x = [ms(moment) for event in events for moment in (event.start, event.end)]
    y = [rows[event.rank] + height for event in events for _ in range(2)]
    line: dict[str, Any] = {"type": "scatter", "mode": "lines", "x": x, "y": y}
    line |= {"hoverinfo": "skip", "name": "critical path", "legendgroup": "critical path"}
    under = {**line, "line": {"width": 4.5, "color": "#ffffff"}, "showlegend": False}
    return [under, {**line, "line": {"width": 2, "color": "#000000"}}]


def _numbers(
    run_spans: Sequence[Span], rows: dict[int, int], middle: float, room: float
) -> list[dict[str, Any]]:
    """The microbatches, where there is room for them (in ms)."""
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
            "hoverinfo": "skip",
            "showlegend": False,
        }
    ]


def _narrowest(timeline: Timeline, room: float) -> float:
    """The ms of the shortest computation that is numbered; `room` if there is none."""
    long = [ms(e.end - e.start) for e in timeline.events if e.action.do.kind]
    return min((duration for duration in long if duration > room), default=room)
