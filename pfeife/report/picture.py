"""A schedule as papers draw it: a row a rank, a box an action, numbered by its microbatch."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfeife.data.schedule import Do, Schedule
from pfeife.data.timeline import Timeline
from pfeife.lowering.lower import chain, insert_actions
from pfeife.lowering.simulate import simulate
from pfeife.report.extra import matplotlib
from pfeife.report.spans import COLOURS, COMPUTES, Span, spans

_UNITS = {Do.FORWARD: 1.0, Do.BACKWARD: 2.0, Do.INPUT_BACKWARD: 1.0, Do.WEIGHT_BACKWARD: 1.0}
_HEIGHT = 0.32  # inches of a row
_LIGHTEST = 0.55  # how much white is in the boxes of a rank's first stage, if it has several


def picture(
    shown: Schedule | Timeline, path: str | os.PathLike[str] | None = None, *, title: str = ""
) -> Any:
    """A figure of matplotlib, which `path` is written with (an SVG or PNG, by its suffix).

    Of a schedule, a forward takes one unit of time, an input- and a weight-backward one each, a
    whole backward two, and a message none; stages are a chain unless the schedule is lowered. The
    stages of one rank have shades, the first the lightest. Blank is where a rank waits. The same
    input gives the same file. Raises ImportError without matplotlib (`pip install
    'pfeife[report]'`), ValueError for a schedule that deadlocks.

    >>> report.picture(sched.families.one_f_one_b(2, 4)).axes[0].get_xlabel()
    'units of time'
    """
    timeline = shown if isinstance(shown, Timeline) else _in_units(shown)
    computed = [span for span in spans(timeline) if span.what in COMPUTES and span.end > span.start]
    ranks = sorted({event.rank for event in timeline.events})
    stages_of = {
        rank: sorted({s.action.stage for s in computed if s.rank == rank}) for rank in ranks
    }
    whole = timeline.seconds or 1.0
    # A box is as wide as its number, but no figure is wider than a page.
    shortest = min((span.end - span.start for span in computed), default=whole)
    width = min(max(0.2 * whole / shortest, 3.5), 14.0)
    plt = matplotlib()
    figure = plt.figure.Figure((width + 0.8, _HEIGHT * len(ranks) + 0.9))
    axes = figure.add_subplot()
    rows = {rank: row for row, rank in enumerate(ranks)}
    for colour, boxes in _by_colour(computed, stages_of).items():
        _fill(plt, axes, colour, [(rows[span.rank], span) for span in boxes])
    # inches, about those of a number with two digits
    if width * shortest / whole > 0.13:
        for span in computed:
            middle, number = (span.start + span.end) / 2, str(span.action.microbatch)
            axes.text(middle, rows[span.rank], number, ha="center", va="center_baseline", size=7.5)
    axes.set_xlim(0, whole)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_xlabel("seconds" if shown is timeline else "units of time")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11)
    _legend(plt, axes, computed)
    if path is not None:
        _save(plt, figure, path)
    return figure


def _save(plt: Any, figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes texts as texts, and the same file for the same figure."""
    metadata = {"Date": None} if Path(path).suffix == ".svg" else None
    # An SVG has its date and random names of its parts otherwise.
    same = {"svg.fonttype": "none", "svg.hashsalt": "pfeife", "font.sans-serif": ["DejaVu Sans"]}
    with plt.rc_context(same):
        figure.savefig(path, bbox_inches="tight", metadata=metadata, dpi=150)


def _in_units(schedule: Schedule) -> Timeline:
    """A schedule in units of time."""
    lowered = any(not action.do.kind for actions in schedule.ranks for action in actions)
    full = schedule if lowered else insert_actions(schedule, chain(schedule))
    return simulate(full, lambda action: _UNITS.get(action.do, 0.0))


def _by_colour(
    computed: Sequence[Span], stages_of: Mapping[int, Sequence[int]]
) -> dict[tuple[float, ...], list[Span]]:
    """Spans by their kinds, and by the places of their stages on their ranks."""
    boxes: dict[tuple[float, ...], list[Span]] = {}
    for span in computed:
        stages, white = stages_of[span.rank], 0.0
        if len(stages) > 1:
            white = _LIGHTEST * (1 - stages.index(span.action.stage) / (len(stages) - 1))
        boxes.setdefault(_mixed(COLOURS[span.what], white), []).append(span)
    return boxes


def _fill(
    plt: Any, axes: Any, colour: tuple[float, ...], boxes: Sequence[tuple[int, Span]]
) -> None:
    """All boxes of a colour as one path."""
    corners = (
        [(o.start, y - 0.44), (o.end, y - 0.44), (o.end, y + 0.44), (o.start, y + 0.44), (0, 0)]
        for y, o in boxes
    )
    path = plt.path.Path
    codes = [path.MOVETO, path.LINETO, path.LINETO, path.LINETO, path.CLOSEPOLY] * len(boxes)
    whole = path([point for five in corners for point in five], codes)
    axes.add_patch(plt.patches.PathPatch(whole, facecolor=colour, edgecolor="#333333", lw=0.5))


def _mixed(colour: str, white: float) -> tuple[float, ...]:
    """A colour with some white in it."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return tuple(part + (1 - part) * white for part in parts)


def _legend(plt: Any, axes: Any, computed: Sequence[Span]) -> None:
    kinds = [what for what in COMPUTES if any(span.what == what for span in computed)]
    boxes = [plt.patches.Patch(color=COLOURS[what]) for what in kinds]
    axes.legend(
        boxes,
        [what.value for what in kinds],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(kinds),
        frameon=False,
        fontsize=8,
        borderpad=0,
        handlelength=1.2,
        columnspacing=1.2,
    )
