"""Traces: valid in the words of the Trace Event Format, complete, and in one clock."""

import json
from collections import Counter

import attrs
from programs import CPU_CORE, captured, clusters, lowered

import pfeife
from pfeife import report, sched
from pfeife.data.schedule import RECEIVES, SENDS, Do, Schedule
from pfeife.lowering.simulate import simulate
from pfeife.report.spans import What

NEEDED = {
    "X": {"name", "cat", "ph", "pid", "tid", "ts", "dur"},
    "M": {"name", "ph", "pid", "tid", "args"},
    "s": {"name", "cat", "ph", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "ph", "pid", "tid", "ts", "id", "bp"},
    "C": {"name", "ph", "pid", "tid", "ts", "args"},
}


def read(text: str) -> dict[str, list[dict]]:
    """A trace by the phases of its events, each checked; slices of a thread do not overlap."""
    whole = json.loads(text)
    assert set(whole) == {"displayTimeUnit", "traceEvents"}
    found: dict[str, list[dict]] = {phase: [] for phase in NEEDED}
    for one in whole["traceEvents"]:
        assert NEEDED[one["ph"]] <= set(one) <= NEEDED[one["ph"]] | {"args", "cname"}
        assert all(type(one[key]) is int for key in ("pid", "tid"))
        assert one["ph"] == "M" or one["ts"] >= 0
        assert one["ph"] != "C" or all(type(value) is int for value in one["args"].values())
        found[one["ph"]].append(one)
    last: dict[tuple[int, int], float] = {}
    for one in found["X"]:
        place = one["pid"], one["tid"]
        assert one["dur"] >= 0 and one["ts"] >= last.get(place, 0.0) - 0.0015
        last[place] = one["ts"] + one["dur"]
    named = {(o["pid"], o["tid"]) for o in found["M"] if o["name"] == "thread_name"}
    assert {(one["pid"], one["tid"]) for one in found["X"]} <= named
    return found


def test_two_runs_in_a_trace():
    """Every action of both, an arrow for each message from its send to its receive, bytes of each
    rank, and the critical path."""
    _, program, _, _ = captured("GPT")
    fused = clusters(program)
    plan = sched.plan(fused, machine=CPU_CORE, microbatches=4, stages=2)
    ranks = pfeife.apply(plan)(fused)
    run = report.expected(ranks, lowered(plan, ranks), report.Target(CPU_CORE))
    trace = read(report.chrome_trace(run, attrs.evolve(run, path=None, memory=())))
    actions = Counter(str(event.action) for event in run.timeline.events)
    drawn = Counter(o["name"] for o in trace["X"] if o["cat"] not in ("wait", "path"))
    assert drawn == {action: 2 * count for action, count in actions.items()}
    processes = {o["args"]["name"] for o in trace["M"] if o["name"] == "process_name"}
    assert processes == {"rank 0", "rank 1", "critical path"}
    messages = [event for event in run.timeline.events if event.action.do in SENDS]
    assert len(trace["s"]) == len(trace["f"]) == 2 * len(messages)
    ends = {one["id"]: one for one in trace["f"]}
    assert all(ends[one["id"]]["pid"] != one["pid"] for one in trace["s"])
    assert all(ends[one["id"]]["ts"] >= one["ts"] for one in trace["s"])
    inside = {o["pid"] for o in trace["X"] if o["cat"] == "receive"}
    assert inside == {e.rank for e in run.timeline.events if e.action.do in RECEIVES}
    for curve in run.memory:
        levels = [o["args"]["bytes"] for o in trace["C"] if o["pid"] == curve.rank]
        assert max(levels) == curve.peak
    assert len({one["cname"] for one in trace["X"] if "cname" in one}) == 5


def test_reductions_have_rows_of_their_own():
    reduced = Schedule.from_csv("0F0,0REDUCE_GRAD,0B0\n1F0,1REDUCE_GRAD,1B0,0REDUCE_GRAD\n")

    def seconds(action):
        return 2.0 if action.do == Do.REDUCE_GRAD else 1.0

    trace = read(report.chrome_trace(simulate(reduced, seconds)))
    names = {
        (o["pid"], o["tid"]): o["args"]["name"] for o in trace["M"] if o["name"] == "thread_name"
    }
    assert set(names.values()) == {"actions", "beside computing"}
    for one in trace["X"]:
        assert ("REDUCE" in one["name"]) == (names[one["pid"], one["tid"]] == "beside computing")


def test_every_action_is_told_and_drawn():
    assert {What(do.drawn) for do in Do} == {*What} - {What.WAIT}
    assert all(do.words and Do(do.value) is do for do in Do)
    assert len({what.colour for what in What}) == len({w.trace_colour for w in What}) == len(What)
