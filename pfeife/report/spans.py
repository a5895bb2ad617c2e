"""A timeline as it is drawn: what each rank does when, waiting apart from receiving."""

from enum import StrEnum
from typing import Self

import attrs

from pfeife.data.schedule import SENDS, Action, received_as
from pfeife.data.timeline import Timeline


class What(StrEnum):
    """What a rank does, in the words of the drawings, with its colours: ours, and that of Chrome's
    reserved ones which traces name."""

    # By Okabe and Ito (https://jfly.uni-koeln.de/color/), which the colour-blind tell apart.
    FORWARD = "forward", "#56b4e9", "thread_state_runnable"
    BACKWARD = "backward", "#e69f00", "thread_state_iowait"
    INPUT_BACKWARD = "input-backward", "#cc79a7", "rail_animation"
    WEIGHT_BACKWARD = "weight-backward", "#009e73", "thread_state_running"
    SEND = "send", "#0072b2", "rail_load"
    RECEIVE = "receive", "#d55e00", "terrible"
    REDUCE = "reduce", "#f0e442", "yellow"
    UNSHARD = "unshard", "#000000", "rail_idle"
    WAIT = "wait", "#b8b8b8", "grey"

    colour: str
    trace_colour: str

    def __new__(cls, text: str, colour: str = "", trace_colour: str = "") -> Self:
        what = str.__new__(cls, text)
        what._value_, what.colour, what.trace_colour = text, colour, trace_colour
        return what


COMPUTES = (What.FORWARD, What.BACKWARD, What.INPUT_BACKWARD, What.WEIGHT_BACKWARD)


@attrs.frozen
class Span:
    """What a rank does from `start` to `end`, in seconds, for an action."""

    rank: int
    what: What
    action: Action
    start: float
    end: float


def spans(timeline: Timeline) -> tuple[Span, ...]:
    """A span for each event; a receive is waiting until the other rank begins to send, and the
    message's way from then on.

    >>> timeline = sched.simulate(sched.families.one_f_one_b(2, 2), lambda action: 1.0)
    >>> [(span.rank, span.what.value, span.start) for span in report.spans(timeline)][:2]
    [(0, 'forward', 0.0), (0, 'forward', 1.0)]
    """
    # A send and its receive are one message: the action of one tells that of the other.
    sent = {received_as(e.action): e.start for e in timeline.events if e.action.do in SENDS}
    drawn_spans = []
    for event in timeline.events:
        what, action, start = What(event.action.do.drawn), event.action, event.start
        if what == What.RECEIVE:
            # A message may have been sent before it is asked for: then nobody has waited.
            begins = min(max(sent.get(action, start), start), event.end)
            if begins > start:
                drawn_spans.append(Span(event.rank, What.WAIT, action, start, begins))
            start = begins
        drawn_spans.append(Span(event.rank, what, action, start, event.end))
    return tuple(drawn_spans)


def idle(timeline: Timeline) -> dict[int, float]:
    """By ranks, the share of the step in which a rank computes nothing."""
    busy: dict[int, float] = {}
    for event in timeline.events:
        # A rank that only waits or sends is in the result too, with all of the step.
        seconds = event.end - event.start if event.action.do.kind else 0.0
        busy[event.rank] = busy.get(event.rank, 0.0) + seconds
    whole = timeline.seconds or 1.0
    return {rank: 1 - busy[rank] / whole for rank in sorted(busy)}
