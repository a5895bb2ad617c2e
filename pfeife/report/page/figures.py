"""plotly's figures, as a page has them."""

from collections.abc import Sequence
from typing import Any

from pfeife.report.extra import plotly

# The colours of texts, lines and the paper come from page.css, which knows of dark screens.
_LOOK = {
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "inherit", "size": 12},
    "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#888888", "activecolor": "#0072b2"},
    "hoverlabel": {
        "bgcolor": "#1b1b1b",
        "bordercolor": "#1b1b1b",
        "align": "left",
        "font": {"color": "#ffffff", "size": 12},
    },
    "hovermode": "closest",
    "xaxis": {"zeroline": False},
    "yaxis": {"zeroline": False},
}


def figure(traces: Sequence[Any], label: str, **layout: Any) -> Any:
    """A `plotly.graph_objects.Figure`; `label` is what it shows, in words, for those who do not see
    it. Raises ImportError without plotly, ValueError for what plotly does not know."""
    objects = plotly().graph_objects
    return objects.Figure(traces, {"meta": label, "template": {"layout": _LOOK}, **layout})


def line(
    name: str, x: Sequence[float | None], y: Sequence[float | None], **style: Any
) -> dict[str, Any]:
    """A trace that is a line, of which nobody can ask more; None parts it."""
    where = {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y}
    return where | {"line": style, "hoverinfo": "skip"}


def points(
    x: Sequence[float], y: Sequence[float], hover: Sequence[str], **marker: Any
) -> dict[str, Any]:
    """A trace of marks, each of which says something to those who point at it, in plotly's own
    markup."""
    where = {"type": "scatter", "mode": "markers", "x": x, "y": y, "marker": marker}
    return where | {"hovertext": hover, "hovertemplate": "%{hovertext}<extra></extra>"}
