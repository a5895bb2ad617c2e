"""A schedule as papers draw it: a row a rank, a box an action, numbered by its microbatch."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pfeife.data.schedule import Do, Schedule
from pfeife.data.timeline import Timeline
from pfeife.lowering.lower import chain, insert_actions
from pfeife.lowering.simulate import simulate
from pfeife.report.extra import matplotlib
from pfeife.report.spans import COMPUTES, Span, spans

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
    # Messages are not drawn: blank is where a rank waits, for one of them or for nothing.
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
    axes.barh(
        [rows[span.rank] for span in computed],
        [span.end - span.start for span in computed],
        left=[span.start for span in computed],
        height=0.88,
        color=[_shade(plt, span, stages_of[span.rank]) for span in computed],
        edgecolor="#333333",
        linewidth=0.5,
    )
    # inches, about those of a number with two digits
    if width * shortest / whole > 0.13:
        for span in computed:
            middle, number = (span.start + span.end) / 2, str(span.action.microbatch)
            axes.text(middle, rows[span.rank], number, ha="center", va="center_baseline", size=7.5)
    axes.set_xlim(0, whole)
    # From above to below, as schedules are read.
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
    # A schedule that has messages already is of a graph that need not be a chain.
    lowered = any(not action.do.kind for actions in schedule.ranks for action in actions)
    full = schedule if lowered else insert_actions(schedule, chain(schedule))
    return simulate(full, lambda action: _UNITS.get(action.do, 0.0))


def _shade(plt: Any, span: Span, stages: Sequence[int]) -> tuple[float, ...]:
    """The colour of its kind, with more white the earlier its stage is among those of its rank."""
    white = 0.0
    if len(stages) > 1:
        white = _LIGHTEST * (1 - stages.index(span.action.stage) / (len(stages) - 1))
    return tuple(part + (1 - part) * white for part in plt.colors.to_rgb(span.what.colour))


def _legend(plt: Any, axes: Any, computed: Sequence[Span]) -> None:
    kinds = [what for what in COMPUTES if any(span.what == what for span in computed)]
    # One box a kind: the shades of its stages would be an entry each.
    boxes = [plt.patches.Patch(color=what.colour) for what in kinds]
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
