"""Decisions as JSON: given back as they were written, or refused."""

import json

import attrs
import pytest
from decisions import ANYTHING, ENDLESS, SAMPLES, SCHEDULE, well_typed
from hypothesis import given, settings
from hypothesis import strategies as st

from pfeife.cost import machine
from pfeife.data import plain
from pfeife.data.machine import Machine
from pfeife.data.plan import Costs, Plan
from pfeife.data.schedule import Schedule
from pfeife.data.timeline import Timeline

H100 = machine("h100-sxm")


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
        (
            Machine,
            plain.to_json(H100).replace(": 80000000000", ": 8e10"),
            r"Machine\.memory: expected int, got 80000000000\.0; write 80000000000",
        ),
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
