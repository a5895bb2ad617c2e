"""The search: what it has tried, the best so far, and the bound."""

from collections.abc import Sequence
from typing import Any

from pfeife.data.plan import Plan
from pfeife.data.tried import Tried
from pfeife.data.units import duration
from pfeife.report.page.elements import Figure, Html, tag
from pfeife.report.page.timelines import ms

MOST = 2_000  # candidates that are drawn; those that were the best are drawn in any case
_MARKS = {
    "given": ("families", "#0072b2", "circle"),
    "rule": ("rules", "#009e73", "triangle-up"),
    "pattern": ("patterns", "#cc79a7", "square"),
    "annealed": ("annealing", "#d55e00", "diamond"),
}


def search_figure(tried: Sequence[Tried], plan: Plan | None) -> Figure | None:
    """Candidates over time, the least step so far as a line above the bound."""
    if not tried:
        return None
    shown = _thinned(tried)
    data = [
        _candidates(source, shown)
        for source in dict.fromkeys(candidate.source for candidate in shown)
    ]
    best = [
        candidate
        for before, candidate in zip([None, *tried], tried, strict=False)
        if _better(before, candidate)
    ]
    end = tried[-1].after
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "best so far",
            "x": [*(round(candidate.after, 4) for candidate in best), round(end, 4)],
            "y": [*(ms(candidate.best) for candidate in best), ms(best[-1].best)],
            "line": {"shape": "hv", "width": 2, "color": "#000000"},
            "hoverinfo": "skip",
        }
    )
    low = tried[-1].best
    if plan is not None and plan.bound_seconds:
        low = plan.bound_seconds
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "bound of the plan's stages",
                "x": [0, round(end, 4)],
                "y": [ms(low)] * 2,
                "line": {"width": 1.5, "color": "#888888", "dash": "dot"},
                "hoverinfo": "skip",
            }
        )
    steps = sorted(candidate.step for candidate in tried)
    # A few candidates that took far longer would press all others together.
    top = min(steps[int(0.95 * (len(steps) - 1))], 2 * tried[-1].best)
    room = 0.08 * max(top - low, 0.02 * top)
    layout = {
        "height": 380,
        "margin": {"l": 70, "r": 10, "t": 44, "b": 40},
        "xaxis": {"title": {"text": "seconds of the search"}, "zeroline": False},
        "yaxis": {
            "title": {"text": "ms of a step"},
            "range": [ms(low - room), ms(top + room)],
            "zeroline": False,
        },
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        "hovermode": "closest",
    }
    label = f"{len(tried)} candidates of a search and the best so far"
    return Figure("search", label, data, layout)


def search_words(tried: Sequence[Tried], plan: Plan | None) -> Html | None:
    """The search in a sentence."""
    if not tried:
        return None
    counts: dict[int, int] = {}
    for candidate in tried:
        counts[candidate.stages] = counts.get(candidate.stages, 0) + 1
    each = ", ".join(f"{count} of {stages} stages" for stages, count in sorted(counts.items()))
    sentence = f"{len(tried)} schedules were timed: {each}. "
    sentence += f"The first took {duration(tried[0].step)}, the best {duration(tried[-1].best)}"
    if plan is not None and plan.bound_seconds:
        sentence += (
            f"; no schedule of the plan's stages takes less than {duration(plan.bound_seconds)}"
        )
    if plan is not None and plan.interrupted:
        sentence += "; the clock ended the search, so that another one may find another plan"
    return tag("p", f"{sentence}.")


def _better(before: Tried | None, candidate: Tried) -> bool:
    return before is None or candidate.best < before.best


def _thinned(tried: Sequence[Tried]) -> list[Tried]:
    """All that were the best once, and of the others evenly so many."""
    every = max(1, len(tried) // MOST)
    pairs = zip([None, *tried], tried, strict=False)
    return [o for i, (before, o) in enumerate(pairs) if i % every == 0 or _better(before, o)]


def _candidates(source: str, shown: Sequence[Tried]) -> dict[str, Any]:
    name, colour, symbol = _MARKS.get(source, (source, "#56b4e9", "cross"))
    candidates = [candidate for candidate in shown if candidate.source == source]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [round(candidate.after, 4) for candidate in candidates],
        "y": [ms(candidate.step) for candidate in candidates],
        "text": [f"{candidate.stages} stages" for candidate in candidates],
        "hovertemplate": f"%{{y}} ms, %{{text}}, {name}<extra></extra>",
        "marker": {"color": colour, "symbol": symbol, "size": 6, "opacity": 0.7},
    }
