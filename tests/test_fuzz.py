"""Damaged files and plans: refused with ValueError, or other data that is as good; never a crash,
a hang, much memory, or wrong numbers."""

import json
import signal

import attrs
import pytest
from damage import CSVS, TEXTS, VALUES, cases, damaged, regrown
from decisions import well_typed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from share import random_cases

from pfeife import report, sched
from pfeife.cost import cache, machines
from pfeife.data import plain
from pfeife.data.machine import Machine
from pfeife.data.network import Network
from pfeife.data.plan import Costs, Plan
from pfeife.data.schedule import Schedule
from pfeife.data.timeline import MemoryCurve, Timeline


@pytest.fixture(autouse=True)
def two_minutes():
    def give_up(*_):
        raise AssertionError("this hangs")

    handler = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)


def use(value: object) -> None:
    """What people do with a value that was read."""
    if isinstance(value, Timeline):
        assert 0 <= value.seconds < 1e13 and value.bubble <= 1
        report.timeline_chart(value)
    elif isinstance(value, MemoryCurve):
        report.memory_chart(value)
        report.memory_table([value])
    elif isinstance(value, Machine):
        assert 0 <= value.transfer_seconds(2**40) < 1e22
    elif isinstance(value, Network):
        report.network_table(value)
        assert all(0 <= link.transfer_seconds(2**40) < 1e25 for link in value.kinds())
    elif isinstance(value, Schedule | Plan):
        order = value.schedule if isinstance(value, Plan) else value
        try:
            sched.verify_schedule(order)
        except ValueError as error:
            assert len(str(error)) < 10_000
        else:
            assert Schedule.from_csv(order.to_csv()) == order


EVENT = '{"rank": %s, "action": {"stage": 0, "do": "F", "microbatch": 0}, "start": %s, "end": %s}'


@random_cases(1500)
@given(cases())
@example(("timeline", '{"events": [%s]}' % (EVENT % (0, 0, 0))))  # a step of no time
@example(("timeline", '{"events": [%s]}' % (EVENT % (10**12, 0, 1))))  # a row for every rank
@example(("timeline", '{"events": [%s]}' % (EVENT % (-1, 0, 1))))
@example(("timeline", '{"events": [%s]}' % (EVENT % (0, -1e300, 1))))  # a column for every second
@example(("timeline", '{"events": [%s]}' % (EVENT % (0, 2, 1))))
@example(("schedule", '{"ranks": [[{"stage": 0, "do": "F", "microbatch": 0, "peer": 3}]]}'))
@example(("schedule", '{"ranks": [[{"stage": 0, "do": "SEND_F", "microbatch": 0}]]}'))
@example(("schedule", f'{{"ranks": [[{{"stage": {10**18}, "do": "F", "microbatch": 0}}]]}}'))
@example(("schedule", f'{{"ranks": [[{{"stage": 0, "do": "F", "microbatch": {10**18}}}]]}}'))
@example(("costs", '{"source": "x", "seconds": {"\\ud800": 1}}'))
@example(("costs", '{"source": "x", "seconds": {"a": -1}}'))
@example(("costs", '{"source": "x", "seconds": {}, "spread": {"a": 1}}'))
@example(("costs", '{"source": "x", "seconds": {"%s": "1"}}' % ("a" * 100_000)))
@example(("plan", '{"stage_of_cluster": [-1], "schedule": {"ranks": []}}'))
@example(("plan", '{"stage_of_cluster": [5], "schedule": {"ranks": []}}'))
@example(("network", TEXTS["network"].replace('"source": 1', '"source": 0')))
@example(("network", TEXTS["network"].replace('"destination": 0', '"destination": 1')))
@example(("cpu-core", TEXTS["cpu-core"].replace('"memory": ', '"memory": 1' + "0" * 40)))
def test_damaged_json(a_gigabyte, case):
    name, text = case
    cls = type(VALUES[name])
    try:
        value = plain.from_json(cls, text)
    except ValueError as error:
        assert str(error).startswith(cls.__name__) and len(str(error)) < 2000
        return
    assert well_typed(value, cls)
    assert plain.from_json(cls, plain.to_json(value)) == value
    use(value)


@random_cases(400)
@given(st.sampled_from(sorted(set(VALUES) - set(machines()))), st.data())
def test_damaged_files_are_noticed(a_gigabyte, tmp_path, name, data):
    """With its checksum, a file is refused or gives what was written."""
    path = tmp_path / "value.json"
    plain.save(VALUES[name], path)
    text = data.draw(data.draw(st.sampled_from((damaged, regrown)))(path.read_text()))
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        value = plain.load(type(VALUES[name]), path)
    except ValueError as error:
        assert str(error).startswith(str(path))
        return
    assert value == VALUES[name] or '"sha256"' not in text


@settings(max_examples=300)
@given(st.data())
def test_damaged_cache_entries_are_no_entries(tmp_path, data):
    entry = VALUES["measured"]
    cache.keep(tmp_path, entry)
    (path,) = tmp_path.glob("*.json")
    text = data.draw(data.draw(st.sampled_from((damaged, regrown)))(path.read_text()))
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert cache.find(tmp_path, entry.key) in (None, entry)
    path.write_text(plain.to_json(attrs.evolve(entry, seconds=0.25)))
    assert cache.find(tmp_path, entry.key) is None, "without a checksum"


def test_a_checksum_is_of_the_content(tmp_path):
    path = tmp_path / "costs.json"
    plain.save(VALUES["costs"], path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(data.items())), indent=4))
    assert plain.load(Costs, path) == VALUES["costs"], "its order and its spaces do not matter"
    data["seconds"]["a"] = 2.0
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"costs\.json: .*checksum .* remove the field 'sha256'"):
        plain.load(Costs, path)
    del data["sha256"]
    path.write_text(json.dumps(data))
    assert plain.load(Costs, path).seconds["a"] == 2.0, "a file by hand has none"
    with pytest.raises(ValueError, match=r"costs\.json: Costs: there is no checksum"):
        plain.load(Costs, path, need_checksum=True)


@random_cases(600)
@given(st.sampled_from(CSVS).flatmap(damaged))
@example("")
@example("\ufeff0F0,0B0\n")
@example('0F0,"\n1F0",1B0\n')  # two ranks made one
@example('0F0," "\n')
@example("0F0\r0B0")
@example("0F0,0B0\r\n")
@example(f"{10**17}F0,0B0\n")
@example(f"0F{10**17}\n")
@example("0F%s\n" % ("9" * 5000))
@example("0F0,0B0,\n")
@example("0F0@1,0B0\n")
@example('"0F0"x\n')
def test_damaged_csv(a_gigabyte, text):
    try:
        order = Schedule.from_csv(text)
    except ValueError as error:
        assert len(str(error)) < 1000
        return
    assert well_typed(order, Schedule) and Schedule.from_csv(order.to_csv()) == order
    use(order)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "\ufeff0F0,0B0\n",
            '0F0,"\n1F0",1B0\n',
            '0F0,"\n',
            '0F0," "\n',
            '"0F0"1\n',
            "0F0\r0B0",
        ),
        *(
            "0F0@1\n",
            f"{10**18}F0\n",
            "0F0;0B0",
            "0F0\n\x001B0\n",
            "-1F0",
            "0F0,0B0" + "," * 5 + "x",
        ),
    ],
)
def test_refused_csv(text):
    """Among them a quote that would make one rank of two."""
    with pytest.raises(ValueError):
        Schedule.from_csv(text)


def test_integers_have_64_bits():
    text = TEXTS["memory"].replace('"rank": 1', f'"rank": {2**63}')
    with pytest.raises(ValueError, match=r"MemoryCurve\.rank: expected an int of 64 bits, got 92"):
        plain.from_json(MemoryCurve, text)
    text = TEXTS["memory"].replace('"rank": 1', f'"rank": {2**63 - 1}')
    assert plain.from_json(MemoryCurve, text).rank == 2**63 - 1


def test_a_csv_error_says_where():
    with pytest.raises(ValueError, match="rank 1, cell 2: '1G0' is not an action such as"):
        Schedule.from_csv("0F0,0B0\n1F0,,1G0\n")


@pytest.mark.parametrize(
    "text",
    [
        '{"source": "x", "seconds": {}, "spread": [' + "[]," * plain.MOST_ITEMS + "[]]}",
        '{"source": "x", "seconds": [' + '{"a":0},' * (plain.LARGEST_FILE // 9) + "0]}",
        "[" * 10**6,
        " " * (plain.LARGEST_FILE + 1),
        '{"source": "' + "x" * plain.LARGEST_FILE + '"}',
        "{" + ",".join(f'"{i}":0' for i in range(10**5)) + ',"7":0}',
    ],
    ids=["lists", "objects", "depth", "spaces", "a string", "a field twice"],
)
def test_large_texts_take_little(a_gigabyte, text):
    """Neither memory nor message."""
    with pytest.raises(ValueError) as error:
        plain.from_json(Costs, text)
    assert len(str(error.value)) < 300
    with pytest.raises(ValueError):
        Schedule.from_csv(text)
    with pytest.raises(ValueError):
        Schedule.from_csv("," * (plain.MOST_ITEMS + 1))
