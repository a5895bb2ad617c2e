"""The bytes of ranks: each over time on a scale of its own, and their peaks beside one another."""

from collections.abc import Sequence
from typing import Any

import attrs

from pfeife.data.timeline import MemoryCurve
from pfeife.data.units import size
from pfeife.report.page.elements import Html, table, tag
from pfeife.report.page.figures import figure, line, points
from pfeife.report.page.timelines import Sides, clock, ms, ticks, whole
from pfeife.report.run import Run

MOST = 64  # ranks, whose peaks are shown at once
_FAR = 4  # times the highest peak, from which on a limit is not drawn to scale
_SIDES, _MARK = ("#0072b2", "#009e73"), "#d55e00"  # those of the sides, and of what stands out


@attrs.frozen
class _Row:
    """Where a rank is drawn, from the bytes that it holds all the time to its peak, or to a limit
    that is near."""

    at: int
    low: int
    peak: int
    limit: int | None

    @property
    def is_near(self) -> bool:
        """Whether there is room for the limit."""
        most = self.peak + 0.5 * (self.peak - self.low)
        return self.limit is not None and self.low <= self.limit <= most

    def height(self, count: int) -> float:
        """Where so many bytes are drawn; rows go down the page, so more bytes are a smaller
        number."""
        high = max(self.peak, self.limit or 0) if self.is_near else self.peak
        # A third of a row above and below its middle; the last third parts it from the next.
        #
        #     at - 0.33         __      the peak, or a limit that is near
        #     at + 0.33   _____/  \____   what the rank holds all the time
        return round(self.at + 0.33 - 0.66 * (count - self.low) / max(high - self.low, 1), 5)


def memory_figure(sides: Sides, limit: int | None) -> Any:
    """A figure of the bytes of each rank over time, with a mark at each peak; None where no bytes
    are known."""
    shown = [(name, run) for name, run in sides if run.memory]
    if not shown:
        return None
    rows = _rows(shown, limit)
    data = [
        _curve(name, run, rows, number and "4px,2px") for number, (name, run) in enumerate(shown)
    ]
    data.append(_peaks(shown[0][1], rows))
    if limit is not None:
        data.append(_limits(whole(sides), list(rows.values()), limit))
    marks = [
        (row.height(count), f"{word}{size(count)}")
        for rank, row in rows.items()
        for word, count in ((f"rank {rank}  ", row.peak), ("", row.low))
    ]
    # plotly's ticks stand where they are put: each row has two, at its peak and at its foot.
    heights, texts = zip(*marks, strict=True)
    return figure(
        data,
        f"Memory of {len(rows)} ranks over time",
        **clock(sides, height=52 * len(rows)),
        yaxis={**ticks(list(rows), {}), "tickvals": heights, "ticktext": texts},
    )


def _rows(sides: Sides, limit: int | None) -> dict[int, _Row]:
    """A row for each rank, with room for all sides."""
    # One scale for both sides of a rank, so that their lines can be compared.
    low: dict[int, int] = {}
    peak: dict[int, int] = {}
    for curve in (curve for _, run in sides for curve in run.memory):
        held = sum(curve.held.values())
        low[curve.rank] = min(held, low.get(curve.rank, held))
        peak[curve.rank] = max(curve.peak, peak.get(curve.rank, 0))
    return {rank: _Row(at, low[rank], peak[rank], limit) for at, rank in enumerate(sorted(low))}


def _curve(name: str, run: Run, rows: dict[int, _Row], dash: str | int) -> dict[str, Any]:
    """The bytes of all ranks as one line; that of the first side is filled."""
    x, y, labels = list[Any](), list[Any](), list[str]()
    for curve in run.memory:
        row = rows[curve.rank]
        for moment, count in run.moments(curve):
            x.append(ms(moment))
            y.append(row.height(count))
            labels.append(size(count))
        # Down to the foot of the row, so that the filled area closes; None parts it from the next.
        x += [x[-1], None]
        y += [row.height(row.low), None]
        labels += ["", ""]
    style = {"shape": "hv", "width": 1.6, "color": _SIDES[bool(dash)], "dash": dash or "solid"}
    filled = {} if dash else {"fill": "toself", "fillcolor": "rgba(86,180,233,.35)"}
    return line(name, x, y, **style) | {
        "text": labels,
        "hoverinfo": "text",
        "hovertemplate": f"%{{text}} at %{{x}} ms, {name}<extra></extra>",
        "hoveron": "points",
        **filled,
    }


def _peaks(run: Run, rows: dict[int, _Row]) -> dict[str, Any]:
    """When each rank holds most, the fullest in words."""
    fullest = _fullest(run.memory)
    tops = [(curve, max(run.moments(curve), key=lambda pair: pair[1])) for curve in run.memory]
    times = [ms(moment) for _, (moment, _) in tops]
    heights = [rows[curve.rank].height(count) for curve, (_, count) in tops]
    sizes = [11 if curve is fullest else 6 for curve in run.memory]
    hover = [_hover(curve) for curve in run.memory]
    marks = points(times, heights, hover, color=_MARK, symbol="diamond", size=sizes)
    return marks | {
        "name": "peak",
        "mode": "markers+text",
        "text": ["fullest rank" if curve is fullest else "" for curve in run.memory],
        "textposition": "top right",
        "cliponaxis": False,
    }


def _hover(curve: MemoryCurve) -> str:
    parts = (f"{word} {size(count)}" for word, count in _parts(curve).items())
    return "<br>".join([f"<b>rank {curve.rank}, {size(curve.peak)}</b>", *parts])


def _limits(end: float, rows: Sequence[_Row], limit: int) -> dict[str, Any]:
    """The limit in the rows that have room for it."""
    # Far above a row it would press the row's own curve flat, so there it is a word alone.
    near = [row.height(limit) for row in rows if row.is_near]
    place = "above" if all(limit > row.peak for row in rows) else "outside of"
    name = f"limit, {size(limit)}{'' if near else f' ({place} all rows)'}"
    # Without points it still stands in the legend, with its bytes.
    x = [x for _ in near for x in (0, end, None)] or [None]
    y = [y for height in near for y in (height, height, None)] or [None]
    return line(name, x, y, width=1.5, color=_MARK, dash="dot")


def _fullest(curves: Sequence[MemoryCurve]) -> MemoryCurve:
    return max(curves, key=lambda curve: curve.peak)


def _parts(curve: MemoryCurve) -> dict[str, int]:
    """What the bytes of a peak are."""
    return {word: count for word, count in {**curve.held, **curve.at_peak}.items() if count}


def memory_rows(sides: Sides, limit: int | None) -> Html | None:
    """The peaks of the ranks, as bars from zero against the limit."""
    sides = [(name, run) for name, run in sides if run.memory]
    if not sides:
        return None
    most = max(curve.peak for _, run in sides for curve in run.memory) or 1
    fullest = _fullest(sides[0][1].memory)
    rank_parts = [_parts(curve) for curve in sides[0][1].memory]
    # Ranks may hold different kinds of bytes: a column for each, in the order of the first.
    words = list(dict.fromkeys(word for parts in rank_parts for word in parts))
    rows = []
    for parts, *curves in zip(rank_parts, *(run.memory for _, run in sides), strict=False):
        first = curves[0]
        room = f"{100 * first.peak / limit:.1f} %" if limit else ""
        mark = ", fullest" if first is fullest else ""
        peaks = (size(curve.peak) for curve in curves)
        kinds = (size(parts[word]) if word in parts else "" for word in words)
        rows.append((f"{first.rank}{mark}", *peaks, _bar(first, most, limit), room, *kinds))
    names = (f"peak, {name}" for name, _ in sides)
    far = ", beyond this scale" if limit and limit > _FAR * most else ""
    scale = f"limit {size(limit)}{far}" if limit else "from zero"
    head = ("rank", *names, scale, "of it", *words)
    return table(rows, head, f"Peak of each rank in bytes, and what it is, {sides[0][0]}", MOST)


def _bar(curve: MemoryCurve, most: int, limit: int | None) -> Html:
    """What is held all the time, what is beside it at the peak, and the limit as a line."""
    is_far = limit is not None and limit > _FAR * most
    # On the scale of a limit that is far away no bar could be told from another.
    top = most if limit is None or is_far else max(limit, most)
    held = sum(curve.held.values())
    parts = [
        tag("span", class_=kind, style=f"width:{100 * count / top:.2f}%")
        for kind, count in (("held", held), ("beside", curve.peak - held))
    ]
    if limit is not None:
        place = 100 * min(limit / top, 1.0)
        parts.append(tag("i", class_="far" if is_far else None, style=f"left:{place:.2f}%"))
    label = f"{size(held)} all the time, {size(curve.peak - held)} beside it at the peak"
    return tag("div", *parts, class_="bar", role="img", aria_label=label, title=label)
