"""The search: what it has tried, the best so far, and the bound."""

from collections.abc import Sequence
from typing import Any

from pfeife.data.plan import Plan
from pfeife.data.tried import Tried
from pfeife.data.units import duration
from pfeife.report.page.elements import Html, tag
from pfeife.report.page.figures import figure, line, points
from pfeife.report.page.timelines import ms

MOST = 2_000  # candidates that are drawn; those that were the best are drawn in any case
_MARKS = {
    "given": ("families", "#0072b2", "circle"),
    "rule": ("rules", "#009e73", "triangle-up"),
    "pattern": ("patterns", "#cc79a7", "square"),
    "annealed": ("annealing", "#d55e00", "diamond"),
}


def search_figure(tried: Sequence[Tried], plan: Plan | None) -> Any:
    """A figure of candidates over time, the least step so far as a line above the bound; None
    without a search."""
    if not tried:
        return None
    # All that were once the best are among those that are drawn, and so its line is whole.
    shown, end = _thinned(tried), round(tried[-1].after, 4)
    times = [*(round(candidate.after, 4) for candidate in shown), end]
    best = [ms(candidate.best) for candidate in [*shown, tried[-1]]]
    traces = [
        *(_candidates(source, shown) for source in dict.fromkeys(each.source for each in shown)),
        line("best so far", times, best, shape="hv", width=2, color="#000000"),
    ]
    # Without a bound the axis begins below the best that was found.
    low = tried[-1].best
    if plan is not None and plan.bound_seconds:
        low = plan.bound_seconds
        bound = [ms(low)] * 2
        dots = {"width": 1.5, "color": "#888888", "dash": "dot"}
        traces.append(line("bound of the plan's stages", [0, end], bound, **dots))
    steps = sorted(candidate.step for candidate in tried)
    # A few candidates that took far longer would press all others together.
    top = min(steps[int(0.95 * (len(steps) - 1))], 2 * tried[-1].best)
    room = 0.08 * max(top - low, 0.02 * top)
    return figure(
        traces,
        f"{len(tried)} candidates of a search and the best so far",
        height=380,
        margin={"l": 70, "r": 10, "t": 44, "b": 40},
        xaxis={"title": {"text": "seconds of the search"}},
        yaxis={"title": {"text": "ms of a step"}, "range": [ms(low - room), ms(top + room)]},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
    )


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


def _thinned(tried: Sequence[Tried]) -> list[Tried]:
    """All that were the best once, and of the others evenly so many."""
    every = max(1, len(tried) // MOST)
    best_before = [float("inf"), *(candidate.best for candidate in tried)]
    pairs = enumerate(zip(best_before, tried, strict=False))
    return [each for at, (best, each) in pairs if at % every == 0 or each.best < best]


def _candidates(source: str, shown: Sequence[Tried]) -> dict[str, Any]:
    name, colour, symbol = _MARKS.get(source, (source, "#56b4e9", "cross"))
    candidates = [candidate for candidate in shown if candidate.source == source]
    times = [round(candidate.after, 4) for candidate in candidates]
    steps = [ms(candidate.step) for candidate in candidates]
    hover = [f"{each.stages} stages, {name}" for each in candidates]
    marks = points(times, steps, hover, color=colour, symbol=symbol, size=6, opacity=0.7)
    return marks | {"name": name, "hovertemplate": "%{y} ms, %{hovertext}<extra></extra>"}
