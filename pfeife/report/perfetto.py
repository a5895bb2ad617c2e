"""Timelines as a trace that Perfetto and chrome://tracing open.

The format is Chrome's Trace Event Format, as JSON: a process a rank, a thread for what it does and
others for what comes beside it, arrows from sends to receives, counters of bytes. Perfetto
takes a colour for each name without its digits, so for each kind.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pfeife.data.schedule import RECEIVES, SENDS, Action, received_as
from pfeife.data.timeline import Timeline
from pfeife.report.run import Run
from pfeife.report.spans import Span, What, spans

_LANES = 100  # threads of one side: what a rank does, and lanes of its reductions


def chrome_trace(predicted: Run | Timeline, measured: Run | Timeline | None = None) -> str:
    """One or two runs as JSON for ui.perfetto.dev or chrome://tracing, on one clock from the start
    of the step; times in us.

    Each rank is a process, with a thread for each run; names are those of actions, such as 1F3.
    The critical path, where there is one, is a process of its own. The same runs give the same
    text.
    """
    both = {"predicted": predicted} | ({"measured": measured} if measured is not None else {})
    sides = {name: run if isinstance(run, Run) else Run(run) for name, run in both.items()}
    # A side is named only where there are two: one alone needs no word in every thread.
    label = list(sides) if len(sides) > 1 else [""]
    events: list[dict[str, Any]] = []
    names: dict[tuple[int, int], str] = {}
    for side, (side_name, run) in enumerate(zip(label, sides.values(), strict=True)):
        events += _slices(run, side, side_name, names)
        events += _arrows(run.timeline, side)
        events += _counters(run, side_name or "predicted")
    ranks = sorted({pid for pid, _ in names})
    path = [(name, run.path) for name, run in sides.items() if run.path is not None]
    for at, (_, critical) in enumerate(path):
        # After the ranks, so that it stands below them.
        pid = 1 + max(ranks, default=0)
        names[pid, at] = "critical path"
        slices = (e for e in critical.events if e.end > e.start)
        events += [_slice(f"rank {e.rank}: {e.action}", pid, at, e.start, e.end) for e in slices]
    # Perfetto takes any order; sorted, the same runs give the same text, and slices nest rightly.
    events.sort(key=lambda event: event["ts"])
    whole = {"displayTimeUnit": "ms", "traceEvents": [*_metadata(names, ranks), *events]}
    return json.dumps(whole, allow_nan=False)


def _slices(
    run: Run, side: int, side_name: str, names: dict[tuple[int, int], str]
) -> Iterator[dict[str, Any]]:
    """What ranks do, with the names of their threads."""
    ends: dict[int, list[float]] = {}  # of the lanes of these, which may overlap
    for span in sorted(spans(run.timeline), key=lambda span: span.start):
        # What members are told and gradients come beside computing, several at once: slices that
        # overlap without being inside of one another need threads of their own.
        lane = 0
        if span.what in (What.REDUCE, What.UNSHARD):
            lane = 1 + _lane(ends.setdefault(span.rank, []), span)
        thread = side * _LANES + lane
        words = [side_name, "beside computing" if lane else ""]
        names[span.rank, thread] = ", ".join(filter(None, words)) or "actions"
        name = f"wait for {span.action}" if span.what == What.WAIT else str(span.action)
        event = _slice(name, span.rank, thread, span.start, span.end)
        arguments = {"stage": span.action.stage, "microbatch": span.action.microbatch}
        yield {**event, "cat": span.what.value, "cname": span.what.trace_colour, "args": arguments}


def _lane(ends: list[float], span: Span) -> int:
    """The first lane that is free."""
    at = next((lane for lane, end in enumerate(ends) if end <= span.start), len(ends))
    ends[at : at + 1] = [span.end]
    return at


def _slice(name: str, pid: int, tid: int, start: float, end: float) -> dict[str, Any]:
    # Both ends are rounded alike: a slice that reached into the next one would look like its
    # parent.
    ts, dur = _us(start), round(_us(end) - _us(start), 3)
    same = {"name": name, "cat": "path", "ph": "X", "pid": pid, "tid": tid}
    return {**same, "ts": ts, "dur": dur}


def _arrows(timeline: Timeline, side: int) -> Iterator[dict[str, Any]]:
    """From each send to its receive, inside of both: an arrow ends at the slice that is open."""
    # A moment before its end the slice is still open; at its end the arrow would have no slice.
    received: dict[Action, tuple[int, float]] = {
        e.action: (e.rank, max(e.start, e.end - 1e-9))
        for e in timeline.events
        if e.action.do in RECEIVES
    }
    sent = [event for event in timeline.events if event.action.do in SENDS]
    for index, event in enumerate(sent):
        rank, end = received.get(received_as(event.action), (None, 0.0))
        if rank is None:
            continue
        # Ids are even for the first side and odd for the second, and so tell all messages apart.
        same = {"name": "message", "cat": "message", "id": 2 * index + side, "tid": side * _LANES}
        yield {**same, "ph": "s", "pid": event.rank, "ts": _us(event.start)}
        yield {**same, "ph": "f", "bp": "e", "pid": rank, "ts": _us(end)}


def _counters(run: Run, side_name: str) -> Iterator[dict[str, Any]]:
    for curve in run.memory:
        for moment, bytes_ in run.moments(curve):
            at = {"ph": "C", "pid": curve.rank, "tid": 0, "ts": _us(moment)}
            yield {"name": f"bytes, {side_name}", **at, "args": {"bytes": bytes_}}


def _metadata(names: dict[tuple[int, int], str], ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The names of processes and threads."""
    for pid in sorted({pid for pid, _ in names}):
        name = f"rank {pid}" if pid in ranks else "critical path"
        common = {"ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"name": "process_name", **common}
        yield {"name": "process_sort_index", **common, "args": {"sort_index": pid}}
    for (pid, tid), name in sorted(names.items()):
        common = {"ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"name": "thread_name", **common}
        yield {"name": "thread_sort_index", **common, "args": {"sort_index": tid}}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
