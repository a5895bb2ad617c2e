"""A timeline as it is drawn: what each rank does when, waiting apart from receiving."""

from enum import StrEnum

import attrs

from pfeife.data.schedule import SENDS, Action, Do, received_as
from pfeife.data.timeline import Timeline


class What(StrEnum):
    """What a rank does, in the words of the drawings."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_BACKWARD = "input-backward"
    WEIGHT_BACKWARD = "weight-backward"
    SEND = "send"
    RECEIVE = "receive"
    REDUCE = "reduce"
    WAIT = "wait"


_WORDS = {
    Do.FORWARD: What.FORWARD,
    Do.BACKWARD: What.BACKWARD,
    Do.INPUT_BACKWARD: What.INPUT_BACKWARD,
    Do.WEIGHT_BACKWARD: What.WEIGHT_BACKWARD,
    Do.SEND_F: What.SEND,
    Do.SEND_B: What.SEND,
    Do.RECV_F: What.RECEIVE,
    Do.RECV_B: What.RECEIVE,
    Do.REDUCE_GRAD: What.REDUCE,
}
COMPUTES = (What.FORWARD, What.BACKWARD, What.INPUT_BACKWARD, What.WEIGHT_BACKWARD)
# By Okabe and Ito (https://jfly.uni-koeln.de/color/), which the colour-blind tell apart.
COLOURS = {
    What.FORWARD: "#56b4e9",
    What.BACKWARD: "#e69f00",
    What.INPUT_BACKWARD: "#cc79a7",
    What.WEIGHT_BACKWARD: "#009e73",
    What.SEND: "#0072b2",
    What.RECEIVE: "#d55e00",
    What.REDUCE: "#f0e442",
    What.WAIT: "#b8b8b8",
}


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
        what, action, start = _WORDS[event.action.do], event.action, event.start
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
