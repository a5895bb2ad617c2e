"""Decisions as text: JSON and CSV give back what was written, and refuse everything else."""

import csv
import json
import math
import threading
import types

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules
from typed import well_typed

from pfeife.cost import machine
from pfeife.data import plain
from pfeife.data.checks import FASTEST, LONGEST, SLOWEST
from pfeife.data.machine import Link, Machine, Mesh
from pfeife.data.plan import Costs, Plan
from pfeife.data.schedule import RECEIVES, SENDS, Action, Do, Schedule, parse_action, received_as
from pfeife.data.timeline import Event, Timeline
from pfeife.lowering.lower import chain, insert_actions
from pfeife.lowering.verify import verify_schedule
from pfeife.sched import gpipe, one_f_one_b

CPU_CORE = machine("cpu-core")
H100 = machine("h100-sxm")
seconds = st.floats(0, LONGEST)
rates = st.floats(SLOWEST, FASTEST)
indices = st.integers(0, 40)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    do = draw(st.sampled_from(Do))
    peer = draw(indices) if do in SENDS or do in RECEIVES else None
    return Action(draw(indices), do, None if do == Do.REDUCE_GRAD else draw(indices), peer)


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


ENDLESS = Link(0, 1, (0, 1), (0.0, 1.0), (0.0, 0.0), (0.0, 0.0), math.inf)


def assert_refused_or_exact(cls: type, text: str) -> None:
    try:
        value = plain.from_json(cls, text)
    except ValueError:
        return
    assert well_typed(value, cls), value
    assert plain.from_json(cls, plain.to_json(value)) == value


@given(ANYTHING)
def test_json_round_trip(value):
    read = plain.from_json(type(value), plain.to_json(value))
    assert read == value and well_typed(read, type(value))
    assert plain.to_json(read) == plain.to_json(value)


@pytest.mark.parametrize("value", SAMPLES, ids=lambda value: type(value).__name__)
def test_json_fields(value):
    """A misspelt field is not ignored, a forgotten one not made up, a doubled one not dropped."""
    fields = json.loads(plain.to_json(value))
    with pytest.raises(ValueError, match=r"unknown fields \['colour'\]"):
        plain.from_json(type(value), json.dumps(fields | {"colour": 1}))
    for field in attrs.fields(type(value)):
        less = {name: item for name, item in fields.items() if name != field.name}
        if field.default is attrs.NOTHING:
            with pytest.raises(ValueError, match=rf"missing fields \['{field.name}'\]"):
                plain.from_json(type(value), json.dumps(less))
        else:
            read = plain.from_json(type(value), json.dumps(less))
            made = isinstance(field.default, attrs.Factory)
            default = field.default.factory() if made else field.default
            assert read == attrs.evolve(value, **{field.name: default})
        doubled = f'{{"{field.name}": {json.dumps(fields[field.name])}, {json.dumps(fields)[1:]}'
        with pytest.raises(ValueError, match="a field twice"):
            plain.from_json(type(value), doubled)
    nested = plain.to_json(Plan((0,), SCHEDULE)).replace('"peer"', '"pear"', 1)
    with pytest.raises(ValueError, match=r"Plan\.schedule\.ranks\[0\]\[0\]: unknown .*'pear'"):
        plain.from_json(Plan, nested)


@pytest.mark.parametrize(
    ("cls", "text", "place"),
    [
        (Machine, "[]", "Machine: expected an object"),
        (Costs, '"costs"', "Costs: expected an object"),
        (Costs, '{"source": "x", "seconds": []}', "Costs.seconds: expected an object"),
        (Costs, '{"source": "x", "seconds": {"a": "1"}}', "Costs.seconds.a: expected a finite"),
        (Costs, '{"source": "x", "seconds": {"a": true}}', "Costs.seconds.a: expected a finite"),
        (Costs, '{"source": "x", "seconds": {"a": null}}', "Costs.seconds.a: expected a finite"),
        (Costs, '{"source": "x", "seconds": {"a": NaN}}', "Costs.seconds.a: expected a finite"),
        (Costs, '{"source": "x", "seconds": {"a": -Infinity}}', "seconds.a: expected a finite"),
        (Costs, '{"source": "x", "seconds": {"a": 1e999}}', "seconds.a: expected a finite"),
        (Costs, '{"source": "x", "seconds": {"a": 1%s}}' % ("0" * 400), "a: expected a finite"),
        (Costs, '{"source": "x", "seconds": {"a": 1%s}}' % ("0" * 5000), "Costs: .*4300 digits"),
        (Costs, '{"source": 1, "seconds": {}}', "Costs.source: expected str, got 1"),
        (Schedule, '{"ranks": {}}', "Schedule.ranks: expected a list"),
        (Schedule, '{"ranks": "0F0"}', "Schedule.ranks: expected a list"),
        (Schedule, '{"ranks": [["0F0"]]}', r"ranks\[0\]\[0\]: expected an object"),
        (Schedule, '{"ranks": [[{"stage": 0, "do": "G"}]]}', "do: 'G' is none of"),
        (Schedule, '{"ranks": [[{"stage": 0, "do": []}]]}', r"do: \[\] is none of"),
        (Schedule, '{"ranks": [[{"stage": 0.0, "do": "F"}]]}', "stage: expected int, got 0.0"),
        (Schedule, '{"ranks": [[{"stage": true, "do": "F"}]]}', "stage: expected int, got True"),
        (Schedule, '{"ranks": [[{"stage": -1, "do": "F"}]]}', "stage must not be negative"),
        (Schedule, '{"ranks": [[{"stage": 0, "do": "F", "microbatch": -2}]]}', "be negative"),
        (Plan, '{"stage_of_cluster": [0, null]}', "missing fields .'schedule'."),
        (Plan, '{"stage_of_cluster": [null], "schedule": {"ranks": []}}', r"cluster\[0\]: expec"),
        (
            Plan,
            '{"stage_of_cluster": [], "schedule": {"ranks": []}, "duplicated": "mask"}',
            "Plan.duplicated: expected a list",
        ),
        (Timeline, '{"events": [[]]}', r"Timeline.events\[0\]: expected an object"),
        (Machine, plain.to_json(H100).replace(": 80000000000", ": 8e10"), "memory: expected int"),
        (Machine, plain.to_json(H100).replace(": 80000000000", ": -1"), "memory must be positive"),
        (Machine, plain.to_json(H100).replace("1e-05", "-1"), "link_latency must not be neg"),
        (Costs, "[" * 100_000, "Costs: this is not JSON"),
        (Costs, "[" * 900 + "]" * 900, "Costs: expected an object"),
        (Costs, "", "Costs: this is not JSON"),
    ],
)
def test_json_of_wrong_type(cls, text, place):
    with pytest.raises(ValueError, match=place):
        plain.from_json(cls, text)


EDITS = st.tuples(
    st.floats(0, 1),
    st.integers(0, 3),
    st.sampled_from(
        ["", *'{}[]",:.-+eE019 \n\\\x00', "null", "true", "NaN", "Infinity", "\u0663", "1e999"]
    ),
)


@settings(max_examples=200)
@given(ANYTHING, st.lists(EDITS, min_size=1, max_size=3))
def test_damaged_json(value, edits):
    """Text that somebody's editor or disk damaged gives ValueError or a value of right types."""
    text = plain.to_json(value)
    for place, removed, added in edits:
        at = int(place * len(text))
        text = text[:at] + added + text[at + removed :]
    assert_refused_or_exact(type(value), text)


@pytest.mark.parametrize("value", SAMPLES, ids=lambda value: type(value).__name__)
def test_truncated_json(value):
    text = plain.to_json(value)
    for end in range(len(text)):
        with pytest.raises(ValueError, match="this is not JSON"):
            plain.from_json(type(value), text[:end])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=200)
@given(ANYTHING, JSON, st.data())
def test_json_with_another_value_inside(value, other, data):
    """A value of another type, anywhere in well-formed JSON."""
    root = {"": json.loads(plain.to_json(value))}
    holder, key = root, ""
    while holder[key] and isinstance(holder[key], dict | list) and data.draw(st.booleans()):
        holder = holder[key]
        keys = holder if isinstance(holder, dict) else range(len(holder))
        key = data.draw(st.sampled_from(list(keys)))
    holder[key] = other
    assert_refused_or_exact(type(value), json.dumps(root[""]))


@settings(max_examples=200)
@given(st.sampled_from([Machine, Costs, Schedule, Plan, Timeline]), JSON)
def test_any_json(cls, data):
    assert_refused_or_exact(cls, json.dumps(data))


def test_what_json_cannot_hold_is_not_written():
    with pytest.raises(ValueError, match="JSON"):
        plain.to_json(ENDLESS)


@given(ANYTHING)
def test_save_and_load(tmp_path, value):
    plain.save(value, tmp_path / "value.json")
    assert plain.load(type(value), str(tmp_path / "value.json")) == value


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "costs.json"
    plain.save(Costs("old", {}), path)
    with pytest.raises(ValueError):
        plain.save(ENDLESS, path)
    assert plain.load(Costs, path) == Costs("old", {})
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


def test_readers_never_see_half_a_file(tmp_path):
    path = tmp_path / "costs.json"
    versions = [Costs(name, {str(i): float(i) for i in range(300)}) for name in ("one", "two")]
    plain.save(versions[0], path)
    done = threading.Event()

    def write():
        for turn in range(100):
            plain.save(versions[turn % 2], path)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert plain.load(Costs, path) in versions
    writer.join()


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "costs.json"
    path.write_bytes(b'{"source": "\xff", "seconds": {}}')
    with pytest.raises(ValueError, match=r"costs\.json: .*utf-8"):
        plain.load(Costs, path)
    path.write_text(json.dumps([1] * 100_000))
    with pytest.raises(ValueError, match=r"costs\.json: Costs: expected an object") as error:
        plain.load(Costs, path)
    assert len(str(error.value)) < 1000, "a large file does not make a large message"
    with path.open("wb") as file:
        file.truncate(plain.LARGEST_FILE + 1)
    with pytest.raises(ValueError, match=r"costs\.json: larger than \d+ bytes"):
        plain.load(Costs, path)
    with pytest.raises(FileNotFoundError):
        plain.load(Costs, tmp_path / "none.json")


@given(actions())
def test_action_text(action):
    assert parse_action(str(action)) == action
    assert parse_action(f" {action}\t") == action


def test_action_text_in_a_chain_is_torchs():
    """The other end of a transfer is written only where torch's text has no place for it."""
    for text, action in {
        "0F1": Action(0, Do.FORWARD, 1),
        "2B0": Action(2, Do.BACKWARD, 0),
        "2I10": Action(2, Do.INPUT_BACKWARD, 10),
        "10W3": Action(10, Do.WEIGHT_BACKWARD, 3),
        "0SEND_F1": Action(0, Do.SEND_F, 1, 1),
        "1RECV_F1": Action(1, Do.RECV_F, 1, 0),
        "1SEND_B1": Action(1, Do.SEND_B, 1, 0),
        "0RECV_B1": Action(0, Do.RECV_B, 1, 1),
        "0SEND_F1@2": Action(0, Do.SEND_F, 1, 2),
        "2RECV_F1@0": Action(2, Do.RECV_F, 1, 0),
        "3REDUCE_GRAD": Action(3, Do.REDUCE_GRAD),
    }.items():
        assert str(action) == text and parse_action(text) == action
    assert received_as(Action(0, Do.SEND_F, 1, 2)) == Action(2, Do.RECV_F, 1, 0)
    assert received_as(Action(2, Do.SEND_B, 1, 0)) == Action(0, Do.RECV_B, 1, 2)


@pytest.mark.parametrize(
    "text",
    [
        *("", "F", "F0", "0", "0G0", "0f0", "-1F0", "0F-1", "0F0 1", "0.0F0", "0F0@", "0F0@1"),
        *("0SEND_F0@-1", "0RECV_F0", "0SEND_B0", "0SEND0", "0REDUCE_GRAD@1", "0UNSHARD"),
        *("\u0663F1", "0F\u00b2", "0F0\x00", "(0F0;1B0)OVERLAP_F_B", "9" * 5000 + "F0"),
    ],
)
def test_what_is_no_action(text):
    with pytest.raises(ValueError):
        parse_action(text)


@given(schedules)
def test_csv_round_trip(schedule):
    assert Schedule.from_csv(schedule.to_csv()) == schedule


@settings(max_examples=200)
@given(st.text(st.sampled_from('019FBIWSENDRECV_@, "\r\n\x00')) | st.text())
def test_any_csv(text):
    """No text makes the reader raise anything but ValueError."""
    try:
        schedule = Schedule.from_csv(text)
    except ValueError:
        return
    assert well_typed(schedule, Schedule)
    assert Schedule.from_csv(schedule.to_csv()) == schedule


def test_a_cell_too_large_is_refused():
    with pytest.raises(ValueError, match="not CSV"):
        Schedule.from_csv("0" * 200_000)


torch_action = torch_schedules._Action.from_str


@pytest.mark.parametrize("order", [gpipe(3, 4), one_f_one_b(3, 4), one_f_one_b(4, 3, (0, 1, 0, 1))])
def test_torch_reads_our_csv(order):
    """torch parses our text, finds it valid, and puts in the same transfers."""
    rows = csv.reader(order.to_csv().splitlines())
    read = {rank: [torch_action(cell) for cell in row] for rank, row in enumerate(rows)}
    assert [[str(a) for a in row] for row in read.values()] == [
        [str(a) for a in rank] for rank in order.ranks
    ]
    placed = torch_schedules._validate_schedule(read, len(read), order.stages, order.microbatches)
    assert placed == dict(enumerate(order.stage_ranks))
    lowered = insert_actions(order, chain(order))
    torchs = torch_schedules._add_send_recv(read, order.stage_ranks.__getitem__, order.stages)
    for rank, ours in zip(torchs.values(), lowered.ranks, strict=True):
        assert sorted(map(str, rank)) == sorted(map(str, ours))


@pytest.mark.parametrize("stages, ranks", [(1, 1), (2, 2), (4, 4), (4, 2), (6, 3)])
def test_we_read_torchs_csv(tmp_path, stages, ranks):
    """A file as torch dumps it, bubbles (empty cells) and torch's own transfers included."""
    order = one_f_one_b(stages, 5, [stage % ranks for stage in range(stages)])
    rows = {
        rank: [None, *(torch_action(str(action)) for action in row), None]
        for rank, row in enumerate(order.ranks)
    }
    dumper = types.SimpleNamespace(pipeline_order=rows, pipeline_order_with_comms=None)
    dump = torch_schedules._PipelineScheduleRuntime._dump_csv
    dump(dumper, tmp_path / "order.csv", "compute_only")
    assert Schedule.from_csv((tmp_path / "order.csv").read_bytes().decode()) == order
    dumper.pipeline_order_with_comms = torch_schedules._add_send_recv(
        {rank: [a for a in row if a] for rank, row in rows.items()},
        order.stage_ranks.__getitem__,
        stages,
    )
    dump(dumper, tmp_path / "lowered.csv", "compute_comms")
    lowered = verify_schedule(Schedule.from_csv((tmp_path / "lowered.csv").read_bytes().decode()))
    assert lowered.computing() == order and lowered.stage_ranks == order.stage_ranks


def test_schedule_counts():
    order = one_f_one_b(4, 3, (0, 1, 0, 1))
    assert (order.stages, order.microbatches, order.stage_ranks) == (4, 3, (0, 1, 0, 1))
    assert insert_actions(order, chain(order)).computing() == order
    assert (Schedule(()).stages, Schedule(()).microbatches) == (0, 0)
    with pytest.raises(ValueError, match="stage 0 runs on ranks 0 and 1"):
        _ = Schedule.from_csv("0F0\n0B0\n").stage_ranks
    with pytest.raises(ValueError, match="stage 1 runs on no rank"):
        _ = Schedule.from_csv("0F0\n2F0\n").stage_ranks
    with pytest.raises(ValueError, match="stage 1 runs on no rank"):  # and takes no memory
        _ = Schedule.from_csv("0F0\n999999999999999F0\n").stage_ranks


def test_timeline_counts():
    """The bubble counts computation alone, over all ranks until the last end."""
    events = (
        Event(0, Action(0, Do.FORWARD, 0), 0.0, 2.0),
        Event(0, Action(0, Do.RECV_B, 0, 1), 2.0, 4.0),
        Event(1, Action(1, Do.FORWARD, 0), 2.0, 4.0),
    )
    timeline = Timeline(events)
    assert timeline.seconds == 4.0 and timeline.bubble == 0.5
    assert Timeline(()).seconds == Timeline(()).bubble == 0.0


def test_mesh():
    assert Mesh(3, 2).size == 6
    for wrong in ((0, 1), (1, 0), (-1, 1)):
        with pytest.raises(ValueError, match="must be positive"):
            Mesh(*wrong)
