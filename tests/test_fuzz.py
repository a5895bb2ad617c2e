"""Damaged files and plans: refused with ValueError, or other data that is as good; never a crash,
a hang, much memory, or wrong numbers."""

import functools
import json
import os
import re
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from programs import captured, clusters
from share import random_cases
from typed import well_typed

import pfeife
from pfeife import report, sched
from pfeife.backend.options import Options, options_from
from pfeife.cost import cache, machine, machines
from pfeife.cost.cache import Measured
from pfeife.data import plain
from pfeife.data.files import read_text
from pfeife.data.machine import Link, Machine, Network
from pfeife.data.plan import Costs, Plan, RecomputeOption
from pfeife.data.schedule import Action, Do, Schedule
from pfeife.data.timeline import MemoryCurve, MemoryPoint, Timeline
from pfeife.ir.outline import inline
from pfeife.runtime import LocalPipeline
from pfeife.testing import assert_same, tied_across

CPU_CORE = machine("cpu-core")


@pytest.fixture(autouse=True)
def two_minutes():
    def give_up(*_):
        raise AssertionError("this hangs")

    handler = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)


@pytest.fixture
def a_gigabyte():
    """What may be taken more than now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    largest = pages * resource.getpagesize() + 2**30
    resource.setrlimit(resource.RLIMIT_AS, (largest, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


ORDER = sched.insert_actions(sched.gpipe(2, 2), sched.chain(sched.gpipe(2, 2)))
LINK = Link(0, 1, (0, 1000), (1e-6, 2e-6), (1e-7, 1e-7), (0.0, 0.0), 0.5)
VALUES = {
    "plan": Plan(
        (0, 0, 1),
        ORDER,
        ("mask",),
        (1.0, 2.0),
        3.5,
        3.25,
        (RecomputeOption(8, 0.25, ("relu",)), RecomputeOption()),
    ),
    "schedule": ORDER,
    "network": Network((LINK, attrs.evolve(LINK, source=1, destination=0))),
    "costs": Costs("measured", {"a": 1.0, "b": 0.5}, {"a": 0.1}, {"b": 0.25}),
    "measured": Measured("aten.mm [4, 4]", 0.5, 0.125, 5, 0.0),
    "timeline": sched.simulate(ORDER, lambda action: 0.5 if action.do.kind else 0.0),
    "memory": MemoryCurve(1, {"parameters": 64}, (MemoryPoint(Action(0, Do.FORWARD, 0), 9, 4),)),
    **{name: machine(name) for name in machines()},
}
TEXTS = {name: plain.to_json(value) for name, value in VALUES.items()}
CSVS = (ORDER.to_csv(), sched.zb_v(4, 4, (0, 1, 1, 0)).to_csv(), sched.one_f_one_b(3, 4).to_csv())

EXTREMES = (
    *("0", "-1", "1", "-0.0", "0.5", "1e-300", "5e-324", "1e300", "1e999", "-1e308", "NaN"),
    *("Infinity", "true", "null", "9223372036854775807", "9223372036854775808", "1" + "0" * 30),
    *("1" + "0" * 400, "1" + "0" * 4400, "999999999", "-9223372036854775809", "1.0", "007"),
)
TOKENS = (
    *'{}[]",:.-+eE019 \n\r\\\x00@_FBIW',
    *(
        "null",
        "[[",
        "]]",
        "\r\n",
        "\ufeff",
        "\u0663",
        "\\ud800",
        "é",
        '""',
        '"a":',
        "0F0,",
        "[" * 2000,
    ),
)
OTHERS = (None, True, False, 0, -1, 1.5, 2**63, 1e300, "", "x", "\ud800", [], {}, [[]], {"a": 1})


ACCIDENTS = ("flip", "delete", "insert", "double", "truncate", "splice", "number")


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """A text after one to three accidents."""
    for _ in range(draw(st.integers(1, 3))):
        at, end = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        short = min(end, at + draw(st.integers(0, 12)))
        match draw(st.sampled_from(ACCIDENTS)):
            case "flip" if at < len(text):
                flipped = chr(ord(text[at]) ^ 1 << draw(st.integers(0, 6)))
                text = text[:at] + flipped + text[at + 1 :]
            case "delete":
                text = text[:at] + text[short:]
            case "insert":
                text = text[:at] + draw(st.sampled_from(TOKENS)) + text[at:]
            case "double":
                text = text[:end] + text[at:end] + text[end:]
            case "truncate":
                text = text[:at]
            case "splice":
                text = text[:at] + text[end:] + text[at:end]
            case "number":
                found = list(re.finditer(r"-?\d+(\.\d+)?(e[-+]?\d+)?", text))
                if found:
                    one = draw(st.sampled_from(found))
                    new = draw(st.sampled_from(EXTREMES))
                    text = text[: one.start()] + new + text[one.end() :]
    return text


def places(data: object, path: tuple = ()) -> list[tuple]:
    """The paths of all values in JSON data but the outermost."""
    if not isinstance(data, dict | list):
        return []
    found = []
    for key, item in data.items() if isinstance(data, dict) else enumerate(data):
        found += [(*path, key), *places(item, (*path, key))]
    return found


def put(data, path: tuple, value) -> None:
    functools.reduce(lambda inner, key: inner[key], path[:-1], data)[path[-1]] = value


def at(data, path: tuple):
    return functools.reduce(lambda inner, key: inner[key], path, data)


@st.composite
def regrown(draw: st.DrawFn, text: str) -> str:
    """JSON text with other values in it, or two of its own exchanged, doubled or dropped."""
    data = json.loads(text)
    paths = places(data)
    one = draw(st.sampled_from(paths))
    match draw(st.sampled_from(["replace", "swap", "drop", "double"])):
        case "replace":
            put(data, one, draw(st.sampled_from(OTHERS)))
        case "swap":
            other = draw(st.sampled_from(paths))
            assume(one != other[: len(one)] and other != one[: len(other)])
            first, second = at(data, one), at(data, other)
            put(data, one, second)
            put(data, other, first)
        case "drop":
            del at(data, one[:-1])[one[-1]]
        case "double":
            holder = at(data, one[:-1])
            if isinstance(holder, list):
                holder.append(holder[one[-1]])
            else:
                holder[f"{one[-1]}_"] = holder[one[-1]]
    return json.dumps(data)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, str]:
    name = draw(st.sampled_from(list(TEXTS)))
    return name, draw(draw(st.sampled_from((damaged, regrown)))(TEXTS[name]))


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
        assert all(0 <= link.transfer_seconds(2**40) < 1e25 for link in value.links)
    elif isinstance(value, Schedule | Plan):
        order = value.schedule if isinstance(value, Plan) else value
        try:
            sched.verify_schedule(order)
        except ValueError as error:
            assert len(str(error)) < 10_000
        else:
            assert Schedule.from_csv(order.to_csv()) == order


EVENT = '{"rank": %s, "action": {"stage": 0, "do": "F", "microbatch": 0}, "start": %s, "end": %s}'


@settings(max_examples=1500)
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


@settings(max_examples=400)
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


@settings(max_examples=600)
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


def test_what_load_refuses_is_not_saved(tmp_path):
    path = tmp_path / "value.json"
    for value, message in (
        (attrs.evolve(CPU_CORE, memory=8e9), "Machine.memory: expected int"),
        (Costs("x" * plain.LARGEST_FILE, {}), "more than 67108864 bytes"),
        (Costs("\ud800", {}), "surrogate"),
        (attrs.evolve(CPU_CORE, sources={"memory": [1]}), "no list goes into JSON"),
    ):
        with pytest.raises(ValueError, match=message):
            plain.save(value, path)
        assert list(tmp_path.iterdir()) == []


# ---- files: what they are, and how they are written


def test_what_is_no_file_is_refused(a_gigabyte, tmp_path):
    """At once: a pipe that nobody writes to, a device without end, a folder."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("pipe", "folder", "endless", "null"):
        before = os.stat(tmp_path / name).st_mode
        for act in (
            lambda path: plain.load(Costs, path),
            lambda path: plain.save(VALUES["costs"], path),
            machine,
            lambda path: pfeife.backend(network=path),
        ):
            with pytest.raises(ValueError, match=f"{name}: not a regular file"):
                act(tmp_path / name)
        assert os.stat(tmp_path / name).st_mode == before
    assert len(list(tmp_path.iterdir())) == 4


def test_names_that_no_file_has(tmp_path):
    for name in ("none.json", "x" * 5000, "a/b/c", "\0", "", "."):
        with pytest.raises(ValueError):
            machine(name)
        with pytest.raises(ValueError):
            pfeife.backend(network=name)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_a_new_file_has_what_open_gives(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        plain.save(VALUES["costs"], tmp_path / "costs.json")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "costs.json").stat().st_mode) == mode


def test_a_replaced_file_keeps_its_permissions(tmp_path):
    path, link = tmp_path / "costs.json", tmp_path / "link.json"
    plain.save(VALUES["costs"], path)
    for mode in (0o600, 0o664):
        path.chmod(mode)
        plain.save(VALUES["costs"], path)
        assert stat.S_IMODE(path.stat().st_mode) == mode
    link.symlink_to(path)
    plain.save(attrs.evolve(VALUES["costs"], source="other"), link)
    assert not link.is_symlink() and plain.load(Costs, path) == VALUES["costs"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write every file")
def test_a_file_that_may_not_be_written_is_kept(tmp_path):
    path = tmp_path / "costs.json"
    plain.save(VALUES["costs"], path)
    path.chmod(0o444)
    with pytest.raises(PermissionError, match=r"costs\.json"):
        plain.save(attrs.evolve(VALUES["costs"], source="other"), path)
    assert plain.load(Costs, path) == VALUES["costs"]


def test_a_write_that_fails_midway(tmp_path):
    """The disk takes a part of the file: the old one is whole, and no other is left."""
    path = tmp_path / "costs.json"
    plain.save(VALUES["costs"], path)
    large = Costs("large", {str(i): 1.0 for i in range(10_000)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            plain.save(large, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert plain.load(Costs, path) == VALUES["costs"] and list(tmp_path.iterdir()) == [path]


WRITER = """
import sys
from pathlib import Path
from pfeife.data.files import write_text
turn = 0
while True:
    turn += 1
    write_text(Path(sys.argv[1]), f"{sys.argv[2]} {turn}\\n" * 20_000)
"""


def test_processes_that_write_until_they_are_killed(tmp_path):
    """A reader finds whole files all the time, and when the writers are gone."""
    path = tmp_path / "text"
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, name]) for name in ("one", "two")]
    seen: set[str] = set()
    try:
        while len(seen) < 200 or len({name.split()[0] for name in seen}) < 2:
            assert all(writer.poll() is None for writer in writers)
            if path.exists():
                seen.add(whole(path))
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    whole(path)


def whole(path: Path) -> str:
    """The version that a file is of, all of it."""
    lines = read_text(path, 2**20).splitlines()
    assert len(lines) == 20_000 and len(set(lines)) == 1, "a torn file"
    return lines[0]


# ---- plans that are good data, and wrong for their program


@functools.cache
def planned(name: str, order: str):
    """A fused program, a plan of it on two or three ranks, and what a step gives."""
    one, program, state, microbatches = captured(name)
    base = clusters(program)
    if sched.splits(order):
        base = pfeife.split_backward()(base)
        costs = pfeife.cost.estimate(base, CPU_CORE)
        base = pfeife.annotate(costs)(base)
    folded = order in ("interleaved", "zb-v")
    plan = sched.plan(
        base,
        machine=CPU_CORE,
        microbatches=4,
        stages=4 if folded else 3,
        ranks=2 if folded else None,
        schedule=order,
    )
    if order == "1f1b":
        staged = pfeife.partition(plan)(base)
        choice = sched.choose_recompute(staged, "full", machine=CPU_CORE)
        plan = attrs.evolve(plan, recompute=choice)
    nodes = inline(base)[0].module.graph.nodes
    names = tuple(node.name for node in nodes if node.op != "output")
    return base, plan, names, state, microbatches, pfeife.evaluate(base, state, microbatches), one


def outcome(name: str, order: str, plan: Plan) -> str:
    """Applies a plan: "refused", or "right"; anything else fails."""
    base, _, _, state, microbatches, expected, one = planned(name, order)
    try:
        ranks = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(base)
        lowered = sched.verify_schedule(sched.lower(plan.schedule, ranks))
        step = LocalPipeline(ranks, lowered).start(state, microbatches)
    except ValueError:
        return "refused"
    step.run()
    assert_same(expected, step.result(), one.tied or tied_across(plan, base))
    return "right"


CHANGES = (
    *("cut", "drop", "double", "swap", "near", "move", "microbatch", "stage", "do", "permute"),
    *("merge", "empty", "without", "duplicated", "recompute", "csv"),
)


@st.composite
def edited(draw: st.DrawFn, plan: Plan, names: tuple[str, ...]) -> Plan:
    """A plan with one thing changed; what the data itself refuses is not drawn."""
    ranks = [list(actions) for actions in plan.schedule.ranks]
    rank = draw(st.sampled_from([i for i, actions in enumerate(ranks) if actions] or [0]))
    assume(ranks and ranks[rank])
    index, other = draw(st.tuples(*[st.integers(0, len(ranks[rank]) - 1)] * 2))
    stage = st.integers(0, plan.stages)
    some = st.lists(st.sampled_from(names), max_size=3).map(tuple)
    changes: dict = {}
    match draw(st.sampled_from(CHANGES)):
        case "cut":
            cuts = list(plan.stage_of_cluster)
            cuts[draw(st.integers(0, len(cuts) - 1))] = draw(stage)
            changes["stage_of_cluster"] = tuple(cuts)
        case "drop":
            del ranks[rank][index]
        case "double":
            ranks[rank].insert(other, ranks[rank][index])
        case "swap":
            row = ranks[rank]
            row[index], row[other] = row[other], row[index]
        case "near":
            row, after = ranks[rank], min(index + 1, len(ranks[rank]) - 1)
            row[index], row[after] = row[after], row[index]
        case "move":
            ranks[draw(st.integers(0, len(ranks) - 1))].insert(other, ranks[rank].pop(index))
        case "microbatch":
            number = draw(st.sampled_from([None, 0, 1, 4, 10**18]))
            ranks[rank][index] = attrs.evolve(ranks[rank][index], microbatch=number)
        case "stage":
            number = draw(stage | st.just(10**18))
            ranks[rank][index] = attrs.evolve(ranks[rank][index], stage=number)
        case "do":
            do = draw(st.sampled_from([do for do in Do if do.kind] + [Do.REDUCE_GRAD]))
            ranks[rank][index] = attrs.evolve(ranks[rank][index], do=do)
        case "permute":
            ranks = draw(st.permutations(ranks))
        case "merge" if len(ranks) > 1:
            taken = ranks.pop(rank)
            ranks[draw(st.integers(0, len(ranks) - 1))] += taken
        case "empty":
            ranks.insert(draw(st.integers(0, len(ranks))), [])
        case "without":
            do, of = draw(st.sampled_from("FBIW")), draw(st.none() | stage)
            ranks = [[a for a in row if a.do != do or of not in (None, a.stage)] for row in ranks]
        case "duplicated":
            changes["duplicated"] = draw(some) + draw(st.sampled_from([(), ("nothing",)]))
        case "recompute":
            options = list(plan.recompute or [RecomputeOption()] * plan.stages)
            one = draw(st.integers(0, len(options) - 1))
            options[one] = attrs.evolve(options[one], names=draw(some))
            changes["recompute"] = tuple(options)
        case "csv":
            text = draw(damaged(plan.schedule.to_csv()))
            ranks = Schedule.from_csv(text).ranks
    changes.setdefault("schedule", Schedule(tuple(map(tuple, ranks))))
    return attrs.evolve(plan, **changes)


PROGRAMS = (("UNet", "interleaved"), ("UNet", "1f1b"), ("GPT", "zb-v"), ("BatchNormNet", "gpipe"))


@random_cases(200)
@given(st.sampled_from(PROGRAMS), st.data())
def test_a_plan_that_is_accepted_is_right(program, data):
    plan, names = planned(*program)[1:3]
    try:
        for _ in range(data.draw(st.sampled_from((1, 1, 2)))):
            plan = data.draw(edited(plan, names))
    except ValueError:
        return  # it is no plan at all
    assert plain.from_json(Plan, plain.to_json(plan)) == plan
    outcome(*program, plan)


@pytest.mark.parametrize("program", PROGRAMS)
def test_plans_of_ours_are_accepted(program):
    assert outcome(*program, planned(*program)[1]) == "right"


def without(plan: Plan, do: str) -> Plan:
    ranks = (tuple(a for a in actions if a.do != do) for actions in plan.schedule.ranks)
    return attrs.evolve(plan, schedule=Schedule(tuple(ranks)))


def refusal(name: str, order: str, plan: Plan) -> str:
    base = planned(name, order)[0]
    with pytest.raises(ValueError) as error:
        ranks = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(base)
        sched.lower(plan.schedule, ranks)
    return str(error.value)


def test_forwards_alone_are_no_training_step():
    """A schedule that could run, but leaves all gradients out."""
    plan = without(planned("UNet", "interleaved")[1], "B")
    assert sched.verify_schedule(plan.schedule)
    assert "no action runs stage_2_backward for microbatch 0" in refusal(
        "UNet", "interleaved", plan
    )


def test_whole_backwards_are_not_run_in_parts():
    plan = planned("UNet", "interleaved")[1]
    parts = tuple(
        tuple(
            part
            for a in actions
            for part in (
                [attrs.evolve(a, do=Do.INPUT_BACKWARD), attrs.evolve(a, do=Do.WEIGHT_BACKWARD)]
                if a.do == "B"
                else [a]
            )
        )
        for actions in plan.schedule.ranks
    )
    plan = attrs.evolve(plan, schedule=Schedule(parts))
    assert "no action runs stage_" in refusal("UNet", "interleaved", plan)


def test_stages_of_one_rank_wait_for_one_another():
    """Stage 2 before stage 0, which it reads, on the same rank."""
    plan = planned("UNet", "interleaved")[1]
    first = list(plan.schedule.ranks[0])
    late = next(i for i, a in enumerate(first) if (a.stage, a.do) == (2, "F"))
    first.insert(0, first.pop(late))
    plan = attrs.evolve(plan, schedule=Schedule((tuple(first), *plan.schedule.ranks[1:])))
    assert re.search(r"rank 0: 2(F|RECV_F)0\S* comes before", refusal("UNet", "interleaved", plan))


def test_duplicated_parts_of_a_tuple_stay_with_it():
    """What is sent is tensors."""
    program = ("BatchNormNet", "gpipe")
    base, plan, *_ = planned(*program)
    parts = [n.name for n in inline(base)[0].module.graph.nodes if n.name.startswith("getitem")]
    assert parts and outcome(*program, attrs.evolve(plan, duplicated=tuple(parts))) == "right"


def test_names_of_nothing_are_refused():
    plan = attrs.evolve(planned("UNet", "interleaved")[1], duplicated=("conv", "nothing"))
    assert "duplicates ['conv', 'nothing'], which are no values" in refusal(
        "UNet", "interleaved", plan
    )


class Scaled(torch.nn.Module):
    """Both layers read what is made from a buffer, which is then updated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        scale = self.scale + 1
        self.scale.mul_(0.9).add_(x.detach().mean())
        return (self.last(self.first(x + scale).tanh()) + scale).tanh()


def test_what_reads_an_updated_buffer_is_not_duplicated():
    """The other rank does not see the updates: it would compute with the first value."""
    model, x = Scaled(), torch.randn(3, 4)
    fused = clusters(pfeife.capture(lambda x: model(x).square().mean(), x))
    plan = Plan((0,) * (fused.units - 1) + (1,), sched.gpipe(2, 3))
    pfeife.partition(plan)(fused)
    with pytest.raises(ValueError, match="buffer scale is updated and used by several stages"):
        pfeife.partition(attrs.evolve(plan, duplicated=("add",)))(fused)


# ---- options, as anybody may write them

ASKED = st.sampled_from(
    [*OTHERS, float("nan"), -1.0, "outside", "cpu", ("cpu",), ["cpu"], {1: "mean"}, {1: []}, 3, "/"]
)


@settings(max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from([field.name for field in attrs.fields(Options)] + ["colour", 3]),
        ASKED,
        max_size=3,
    )
)
def test_any_options(given):
    try:
        options = options_from(given)
    except ValueError as error:
        assert "option" in str(error)
        return
    assert options.microbatches % options.replicas == 0 and type(options.search_seconds) is not str


@pytest.mark.parametrize("argument", ["0", "-1", "x", "", "1e3", "\u0663", "9" * 5000, "1.5"])
def test_counts_on_the_command_line(argument, capsys):
    from pfeife.__main__ import main

    with pytest.raises(SystemExit) as stopped:
        main(["bench-network", f"--repeats={argument}"])
    assert stopped.value.code == 2 and "--repeats" in capsys.readouterr().err
    assert main(["bench-network", "--out", "/no/such/folder/x.json"]) == 2
    assert "there is no such folder" in capsys.readouterr().err
