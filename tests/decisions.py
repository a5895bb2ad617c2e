"""Decisions as data: drawn ones, samples, and whether one has its declared types."""

import math
import types
import typing

import attrs
from hypothesis import strategies as st

from pfeife.cost import machine
from pfeife.data.checks import FASTEST, LONGEST, SLOWEST
from pfeife.data.link import Link
from pfeife.data.machine import Machine
from pfeife.data.plan import Costs, Plan
from pfeife.data.schedule import ONCE, RECEIVES, SENDS, Action, Do, Schedule
from pfeife.data.timeline import Event, Timeline
from pfeife.lowering.lower import chain, insert_actions
from pfeife.sched.families import gpipe


def well_typed(value: object, hint: typing.Any) -> bool:
    """Whether a value and all in it have exactly the declared types, floats being finite."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(well_typed(value, argument) for argument in arguments)
    if origin is tuple:
        return type(value) is tuple and all(well_typed(item, arguments[0]) for item in value)
    if origin is dict:
        pairs = value.items() if type(value) is dict else [(None, None)]
        return all(well_typed(k, arguments[0]) and well_typed(v, arguments[1]) for k, v in pairs)
    if attrs.has(hint):
        hints = typing.get_type_hints(hint)
        return type(value) is hint and all(well_typed(getattr(value, n), hints[n]) for n in hints)
    return type(value) is hint and (hint is not float or math.isfinite(value))


CPU_CORE = machine("cpu-core")
ENDLESS = Link(0, 1, (0, 1), (0.0, 1.0), (0.0, 0.0), (0.0, 0.0), math.inf)
seconds = st.floats(0, LONGEST)
rates = st.floats(SLOWEST, FASTEST)
indices = st.integers(0, 40)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    do = draw(st.sampled_from(Do))
    peer = draw(indices) if do in SENDS or do in RECEIVES else None
    return Action(draw(indices), do, None if do in ONCE else draw(indices), peer)


def tuples(of: st.SearchStrategy) -> st.SearchStrategy[tuple]:
    return st.lists(of, max_size=4).map(tuple)


schedules = st.builds(Schedule, st.lists(tuples(actions()), min_size=1, max_size=4).map(tuple))
dtypes = st.sampled_from(["float32", "bfloat16", "float64"])
machines = st.builds(
    Machine,
    st.text(),
    rates | st.dictionaries(dtypes, rates).map(lambda some: some | {"float32": 1.0}),
    rates,
    st.integers(1, 2**62),
    rates,
    seconds,
    seconds,
    overlap=st.floats(0, 1),
    peak_flops=st.dictionaries(dtypes, rates),
    peak_memory_bandwidth=st.none() | rates,
    device_names=tuples(st.text(max_size=4)),
    sources=st.dictionaries(st.sampled_from(["flops", "memory"]), st.text(max_size=4)),
)
costs = st.builds(Costs, st.text(), st.dictionaries(st.text(), seconds, max_size=4))
spans = st.tuples(seconds, seconds).map(sorted)
timelines = st.builds(
    Timeline,
    tuples(
        st.builds(lambda r, a, span: Event(r, a, *span), st.integers(0, 9), actions(), spans),
    ),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    schedule = draw(schedules)
    stage_of = draw(tuples(st.integers(0, schedule.stages - 1))) if schedule.stages else ()
    count = 1 + max(stage_of, default=-1)
    each = st.lists(seconds, min_size=count, max_size=count).map(tuple)
    return Plan(
        stage_of,
        schedule,
        draw(tuples(st.text())),
        draw(st.none() | each),
        draw(st.none() | seconds),
    )


ANYTHING = st.one_of(machines, costs, schedules, timelines, plans())
SCHEDULE = insert_actions(gpipe(2, 1), chain(gpipe(2, 1)))
SAMPLES = (
    CPU_CORE,
    Costs("by hand", {"one": 1.0, "two": 0.5}),
    SCHEDULE,
    Timeline((Event(0, Action(0, Do.FORWARD, 0), 0.0, 1.5),)),
    Plan((0, 0, 1), SCHEDULE, ("mask",), (1.0, 2.0), 3.5),
)
