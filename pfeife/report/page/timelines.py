"""What ranks do and hold over time: a row a rank, predicted and measured on one clock."""

from collections.abc import Mapping, Sequence
from typing import Any

from pfeife.data.timeline import Timeline
from pfeife.data.units import size
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


def ticks(ranks: Sequence[int], said: Mapping[int, str]) -> dict[str, Any]:
    """An axis with a row for each rank, the first above, and what is said of some of them."""
    return {
        "range": [len(ranks) - 0.4, -0.6],
        "tickvals": list(range(len(ranks))),
        "ticktext": [f"rank {rank}{said.get(rank, '')}" for rank in ranks],
        "zeroline": False,
        "showgrid": False,
    }


def timelines(sides: Sides) -> Html | None:
    """The rows of all ranks, and a table of what they wait."""
    if not sides:
        return None
    shares = {name: idle(run.timeline) for name, run in sides}
    ranks = sorted({rank for found in shares.values() for rank in found})
    rows = [
        (rank, *(f"{100 * found.get(rank, 1.0):.1f} %" for found in shares.values()))
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
        found = sorted(spans(run.timeline), key=lambda one: (one.rank, one.start))
        for what in What:
            mine = [one for one in found if one.what == what]
            if not mine:
                continue
            is_first = all(one.get("legendgroup") != what for one in data)
            data.append(_trace(what, len(found) > _MANY) | {"showlegend": is_first})
            drawn.append(
                {
                    "side": name,
                    "what": what,
                    "middle": places[index][0],
                    "half": places[index][1] * _HALF.get(what, 1.0),
                    "rows": [rows[one.rank] for one in mine],
                    "starts": [_ms(one.start) for one in mine],
                    "ends": [_ms(one.end) for one in mine],
                    "actions": [str(one.action) for one in mine],
                }
            )
        if run.path is not None:
            middle, half = places[index]
            data += _path(run.path, rows, middle - 0.75 * half)
        data += _numbers(found, rows, places[index][0], 0.011 * _whole(sides))
    label = f"Timeline of {len(ranks)} ranks, {' and '.join(name for name, _ in sides)}"
    height = len(ranks) * (26 if len(sides) == 1 else 44)
    layout = {**_layout(sides, height), "hovermode": False, "dragmode": "zoom"}
    layout["yaxis"] = {**ticks(ranks, _bubbles(sides)), "fixedrange": True}
    numbered = [*(_narrowest(run.timeline, 0.011 * _whole(sides)) for _, run in sides)]
    more = {"spans": drawn, "ranks": ranks, "numbered": min(numbered)}
    return Figure("timeline", label, data, layout, more)


def _layout(sides: Sides, height: int) -> dict[str, Any]:
    """What timeline and memory have in common: above one another, they have one clock."""
    return {
        "height": 134 + height,
        "margin": {"l": 150, "r": 10, "t": 44, "b": 40},
        "xaxis": {"title": {"text": "ms"}, "zeroline": False, "range": [0, _whole(sides)]},
        "legend": {"orientation": "h", "y": 1, "yanchor": "top", "yref": "container", "x": 0},
    }


def _bubbles(sides: Sides) -> dict[int, str]:
    """By ranks, their bubbles in brackets."""
    found: dict[int, list[str]] = {}
    for _, run in sides:
        for rank, share in idle(run.timeline).items():
            found.setdefault(rank, []).append(f"{100 * share:.0f}")
    return {rank: f" ({', '.join(shares)} %)" for rank, shares in found.items()}


def _places(count: int) -> list[tuple[float, float]]:
    """The middle of each side in a row, and half of its height."""
    return [(0.0, 0.42)] if count == 1 else [(-0.22, 0.2), (0.22, 0.2)]


def _ms(seconds: float) -> float:
    return float(f"{1e3 * seconds:.7g}")


def _whole(sides: Sides) -> float:
    return _ms(max((run.timeline.seconds for _, run in sides), default=0.0)) or 1.0


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
    x = [_ms(moment) for event in events for moment in (event.start, event.end)]
    y = [rows[event.rank] + height for event in events for _ in range(2)]
    line: dict[str, Any] = {"type": "scatter", "mode": "lines", "x": x, "y": y}
    line |= {"hoverinfo": "skip", "name": "critical path", "legendgroup": "critical path"}
    under = {**line, "line": {"width": 4.5, "color": "#ffffff"}, "showlegend": False}
    return [under, {**line, "line": {"width": 2, "color": "#000000"}}]


def _numbers(
    found: Sequence[Span], rows: dict[int, int], middle: float, room: float
) -> list[dict[str, Any]]:
    """The microbatches, where there is room for them (in ms)."""
    mine = [one for one in found if one.what in COMPUTES and _ms(one.end - one.start) > room]
    if not mine or len(mine) > _LETTERED:
        return []
    return [
        {
            "type": "scatter",
            "mode": "text",
            "x": [_ms((one.start + one.end) / 2) for one in mine],
            "y": [rows[one.rank] + middle for one in mine],
            "text": [str(one.action.microbatch) for one in mine],
            "textfont": {"size": 10, "color": "#000000"},
            "hoverinfo": "skip",
            "showlegend": False,
        }
    ]


def _narrowest(timeline: Timeline, room: float) -> float:
    """The ms of the shortest computation that is numbered; `room` if there is none."""
    long = [_ms(e.end - e.start) for e in timeline.events if e.action.do.kind]
    return min((ms for ms in long if ms > room), default=room)


def memory_figure(sides: Sides, limit: int | None) -> Figure | None:
    """The bytes of each rank over time; a row is as high as the limit, or as the highest peak."""
    every = sides
    sides = [(name, run) for name, run in every if run.memory]
    if not sides:
        return None
    curves = [curve for _, run in sides for curve in run.memory]
    ranks = sorted({curve.rank for curve in curves})
    rows = {rank: row for row, rank in enumerate(ranks)}
    most = max(curve.peak for curve in curves)
    top = (max(limit, most) if limit and most > 0.3 * limit else most) or 1
    data: list[dict[str, Any]] = []
    for name, run in sides:
        is_first = not data
        if is_first:
            data += [_held(run, rows, top)]
        data.append(_curve(name, run, rows, top, dashed=not is_first))
    data.append(_limits(_whole(every), rows, top, limit))
    layout = {**_layout(every, 40 * len(ranks)), "hovermode": "closest"}
    layout["yaxis"] = {**ticks(ranks, {}), "fixedrange": True}
    return Figure("memory", f"Memory of {len(ranks)} ranks over time", data, layout)


def _height(row: int, share: float) -> float:
    return round(row + 0.4 - 0.8 * share, 5)


def _curve(name: str, run: Run, rows: dict[int, int], top: int, *, dashed: bool) -> dict[str, Any]:
    x, y, said = list[Any](), list[Any](), list[Any]()
    for curve in run.memory:
        for moment, bytes_ in run.moments(curve):
            x.append(_ms(moment))
            y.append(_height(rows[curve.rank], bytes_ / top))
            said.append(size(bytes_))
        x.append(None)
        y.append(None)
        said.append("")
    line = {"shape": "hv", "width": 1.6, "color": "#d55e00" if dashed else "#0072b2"}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": x,
        "y": y,
        "text": said,
        "hovertemplate": f"%{{text}} at %{{x}} ms, {name}<extra></extra>",
        "line": {**line, "dash": "4px,2px" if dashed else "solid"},
    }


def _held(run: Run, rows: dict[int, int], top: int) -> dict[str, Any]:
    """What is held all the time, as areas."""
    x, y, end = list[Any](), list[Any](), _ms(run.timeline.seconds)
    for curve in run.memory:
        low, high = _height(rows[curve.rank], 0), None
        high = _height(rows[curve.rank], sum(curve.held.values()) / top)
        x += [0, end, end, 0, 0, None]
        y += [low, low, high, high, low, None]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "held all the time",
        "fill": "toself",
        "fillcolor": "rgba(86,180,233,.35)",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "x": x,
        "y": y,
    }


def _limits(end: float, rows: dict[int, int], top: int, limit: int | None) -> dict[str, Any]:
    """The limit of each rank; without one, the highest peak of all."""
    is_near = limit is not None and limit <= top
    y = [_height(row, (limit or 0) / top if is_near else 1.0) for row in rows.values()]
    beyond = f" (the limit is {size(limit)})" if limit else ""
    said = f"limit, {size(limit or 0)}" if is_near else f"highest peak, {size(top)}{beyond}"
    return {
        "type": "scatter",
        "mode": "lines",
        "name": said,
        "x": [one for _ in rows for one in (0, end, None)],
        "y": [one for height in y for one in (height, height, None)],
        "line": {"width": 1, "color": "#888888", "dash": "dot"},
        "hoverinfo": "skip",
    }


def memory_rows(sides: Sides, limit: int | None) -> Html | None:
    """The peaks of the ranks."""
    sides = [(name, run) for name, run in sides if run.memory]
    if not sides:
        return None
    rows = []
    for curves in zip(*(run.memory for _, run in sides), strict=False):
        first = curves[0]
        parts = {**first.held, **first.at_peak}
        what = ", ".join(f"{word} {size(count)}" for word, count in parts.items() if count)
        room = f"{100 * first.peak / limit:.0f} %" if limit else ""
        rows.append((first.rank, *(size(one.peak) for one in curves), room, what))
    peaks = (f"peak, {name}" for name, _ in sides)
    head = ("rank", *peaks, "of the limit", f"what it is at the peak, {sides[0][0]}")
    return table(rows, head, "Peak of each rank, in bytes")
