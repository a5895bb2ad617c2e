"""The page: what is known of a plan, a section each."""

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import attrs

from pfeife.data.plan import Plan
from pfeife.data.timeline import Timeline
from pfeife.data.tried import Tried
from pfeife.data.units import duration, size
from pfeife.passes.compose import Recorded
from pfeife.report.extra import plotly
from pfeife.report.forecast import waits_of
from pfeife.report.page.elements import Html, lines, tag
from pfeife.report.page.memory import memory_figure, memory_rows
from pfeife.report.page.passes import passes
from pfeife.report.page.searched import search_figure, search_words
from pfeife.report.page.stages import ranked, stage_figure, stage_table, stages_of
from pfeife.report.page.timelines import timeline_figure, timelines
from pfeife.report.run import Run


@attrs.frozen
class About:
    """What a page says beside programs and runs: its title, the machine's name, the bytes that a
    rank may take, sentences of the caller's, what a search has tried (the argument `watched` of
    `sched.plan` is told), and what was asked for, in words by their names, of which "command" is
    how."""

    title: str = "A pipeline"
    machine: str = ""
    limit: int | None = None
    notes: tuple[str, ...] = ()
    tried: tuple[Tried, ...] = ()
    asked: Mapping[str, str] = attrs.field(factory=dict)


def html(
    history: Sequence[Recorded] = (),
    plan: Plan | None = None,
    predicted: Run | Timeline | None = None,
    measured: Run | Timeline | None = None,
    about: About = About(),
) -> str:
    """One page of HTML about a plan, its passes and its runs; what is not given is left out.

    `history` is what `record` gives, whose last program has messages (`pfeife.apply(plan)`). The
    page needs no network, and runs no code but its own; the same input gives the same page. Raises
    ImportError without plotly (`pip install 'pfeife[report]'`).
    """
    runs = (("predicted", predicted), ("measured", measured))
    sides = [(n, r if isinstance(r, Run) else Run(r)) for n, r in runs if r is not None]
    stages = stages_of(history, plan) if plan else ()
    drawn = {
        "stages": stage_figure(stages, ranked(history)),
        "timeline": timeline_figure(sides),
        "memory": memory_figure(sides, about.limit),
        "search": search_figure(about.tried, plan),
    }
    figures = {name: figure for name, figure in drawn.items() if figure}
    sections = [
        _section("Stages", _STAGES, figures, stage_table(stages)),
        _section("Timeline", _TIMELINE, figures, timelines(sides)),
        _section("Memory", _MEMORY, figures, memory_rows(sides, about.limit)),
        _section("Search", _SEARCH, figures, search_words(about.tried, plan)),
        _section("Passes", _PASSES, figures, passes(history)),
    ]
    inside = [_head(plan, sides, about), *(section for section in sections if section)]
    return _document(about.title, inside, figures)


_STAGES = (
    "Each stage in the row of its rank, from left to right as the forward goes. The colour is its "
    "time for a microbatch over the mean of all; lines have the bytes that go forward. Point at "
    "one for those that come back."
)
_TIMELINE = (
    "A row a rank, predicted above measured where there are both, with the bubble in brackets; "
    "numbers are microbatches. Waiting for a message is thin, and blank is where a rank has "
    "nothing to do. Drag to zoom in, double-click to see all, point at a span to see what it is."
)
_MEMORY = (
    "Each rank on a scale of its own, from the bytes that it holds all the time to its peak, which "
    "stand at the row; the limit where it is near. Point at a peak to see what it is. Below, all "
    "peaks on one scale from zero, against the limit; grey is what is held all the time."
)
_SEARCH = "Schedules that were timed while cuts, placement and schedule were searched together."
_PASSES = "What each pass has changed in the printed program."


def _section(
    title: str, explanation: str, figures: Mapping[str, Any], *rest: Html | None
) -> Html | None:
    """A heading with its figure, tables and texts; None where there is neither."""
    name, shown = title.lower(), [part for part in rest if part]
    if name not in figures and not shown:
        return None
    heading = tag("h2", title, id=f"h-{name}")
    paragraph = tag("p", explanation, class_="soft")
    place = _place(name, figures[name]) if name in figures else ""
    first = tag("div", heading, paragraph, place, class_="first")
    return tag("section", first, *shown, aria_labelledby=f"h-{name}", id=f"s-{name}")


def _place(name: str, figure: Any) -> Html:
    """Where page.js draws a figure; as high as that will be, so that nothing moves then."""
    height = f"min-height:{figure.layout.height}px"
    label = figure.layout.meta
    return tag("div", id=name, class_="figure", role="img", aria_label=label, style=height)


def _head(plan: Plan | None, sides: Sequence[tuple[str, Run]], about: About) -> Html:
    """The title, what was asked for, figures at a glance, and what limits the step."""
    words = {**about.asked, "machine": about.machine or about.asked.get("machine", "")}
    command = words.pop("command", "")
    figures: list[tuple[str, str, str]] = []
    if plan is not None:
        ranks, microbatches = len(plan.schedule.ranks), plan.schedule.microbatches
        of = f"{microbatches} microbatches"
        figures.append(("stages on ranks", f"{plan.stages} on {ranks}", of))
    if sides:
        figures += _figures(plan, sides, about.limit)
    requests = (
        tag("div", tag("dt", word), tag("dd", text)) for word, text in words.items() if text
    )
    boxes = (
        tag("div", tag("dt", word), tag("dd", figure, tag("small", more) if more else ""))
        for word, figure, more in figures
    )
    limits = [_limits(run.path, run) for _, run in sides if run.path is not None]
    parts = [
        tag("h1", about.title),
        tag("p", tag("code", command)) if command else "",
        tag("dl", *requests, class_="asked"),
        tag("dl", *boxes, class_="figures"),
        *(tag("p", sentence) for sentence in limits if sentence),
        *(tag("p", note, class_="note") for note in about.notes),
    ]
    return tag("header", *parts)


def _figures(
    plan: Plan | None, sides: Sequence[tuple[str, Run]], limit: int | None
) -> Iterator[tuple[str, str, str]]:
    """The step, its bubble and the highest peak, those of the first run large."""
    steps = [(name, duration(run.timeline.seconds)) for name, run in sides]
    bound = plan.bound_seconds if plan is not None else None
    of: list[str] = []
    if bound:  # of the plan's own costs
        bound = min(bound, sides[0][1].timeline.seconds)
        of.append(f"no schedule of these stages below {duration(bound)}")
    yield _figure("step", steps, of)
    bubbles = [(name, f"{100 * run.timeline.bubble:.1f} %") for name, run in sides]
    yield _figure("bubble", bubbles, ["of all ranks' time"])
    # The rank that is full first decides whether a step fits; the others have room.
    worst = [(n, max(r.memory, key=lambda curve: curve.peak)) for n, r in sides if r.memory]
    if worst:
        of = [f"rank {worst[0][1].rank}", *([f"limit {size(limit)}"] if limit else [])]
        yield _figure("peak memory", [(name, size(curve.peak)) for name, curve in worst], of)


def _figure(
    word: str, figures: Sequence[tuple[str, str]], more: Sequence[str]
) -> tuple[str, str, str]:
    """A figure, what it is of, and what else there is to say of it."""
    (first, figure), *rest = figures
    details = [f"{name} {value}" for name, value in rest]
    return f"{word}, {first}", figure, "; ".join([*details, *more])


def _limits(path: Timeline, run: Run) -> str:
    """What the step of a run with a critical path waits for, in a sentence."""
    # A page may have a run and no plan: where stages are, its own events say.
    ranks = {event.action.stage: event.rank for event in path.events}
    stage_ranks = [ranks.get(stage, 0) for stage in range(1 + max(ranks, default=0))]
    waits = waits_of(path, stage_ranks, run.telling)
    # A sentence of more than four parts, or of parts under 2 %, says nothing.
    shown = [wait for wait in waits[:4] if wait.share >= 0.02]
    parts = [f"{wait.share:.0%} {wait.what}" for wait in shown]
    rest = 1 - sum(wait.share for wait in shown)
    if len(waits) > len(shown) and rest >= 0.005:
        parts.append(f"{rest:.0%} in {len(waits) - len(shown)} smaller parts")
    return f"What limits the step, by its critical path: {'; '.join(parts)}." if shown else ""


def _document(title: str, inside: Sequence[Html], figures: Mapping[str, Any]) -> str:
    # Nothing runs but these two, which the browser knows by their digests: it takes them of texts
    # whose lines end as HTML's do.
    library = plotly().offline.get_plotlyjs().replace("\r\n", "\n") if figures else ""
    own = _asset("page.js")
    policy = (
        f"default-src 'none'; script-src {_digest(library)} {_digest(own)}; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    head = [
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", title),
        tag("style", Html(_asset("page.css"))),
    ]
    data = plotly().io.json.to_json_plotly(figures)  # in which nothing ends an element
    # The texts come first: they are read while plotly starts.
    body = [
        tag("main", lines(inside)),
        tag("div", id="tip", role="status", hidden=True),
        tag("noscript", "The drawings of this page need JavaScript; its tables do not."),
        tag("script", Html(data), type="application/json", id="figures"),
        tag("script", Html(library)),
        tag("script", Html(own)),
    ]
    page = tag("html", tag("head", lines(head)), tag("body", lines(body)), lang="en")
    return f"<!doctype html>\n{page}\n"


def _digest(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
