"""Long work shows itself: bars on terminals, lines in the log, artifacts in torch's trace."""

import contextlib
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from listening import Lines, Terminal
from models import case
from programs import fused

import pfeife
from pfeife import _torch, report, sched
from pfeife.cost import estimate, machine
from pfeife.data import plain
from pfeife.data.plan import Plan
from pfeife.data.progress import Shown, shown
from pfeife.data.schedule import Schedule

LOG = logging.getLogger("pfeife")
PHASES = ["capturing", "fusing", "measuring", "planning", "building", "first step"]
QUICK = {"after": 0.0, "every": 0.0}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


@pytest.fixture
def lines():
    """What is logged; the logger is left as it was, which is without handlers."""
    handler = Lines()
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    yield handler
    LOG.removeHandler(handler)
    LOG.setLevel(logging.NOTSET)
    assert not LOG.handlers


def screen(text: str) -> list[str]:
    """What a terminal shows of what was written to it."""
    shown_lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        shown_lines.append("".join(cells).rstrip())
    return shown_lines


def test_a_phase_on_a_terminal():
    terminal = Terminal()
    with Shown(LOG, terminal=terminal, **QUICK).phase("working") as phase:
        assert screen(terminal.getvalue()) == ["pfeife: working ..."]
        phase.progress(1, 2)
        assert screen(terminal.getvalue()) == [f"pfeife: working [{'#' * 15}{'.' * 15}] 1/2"]
        phase.progress(2, 2)
    assert screen(terminal.getvalue()) == [f"pfeife: working [{'#' * 30}] 2/2 0.0 s", ""]


def test_a_short_phase_leaves_nothing():
    terminal = Terminal()
    with Shown(LOG, terminal=terminal).phase("working") as phase:
        phase.progress(1, 1)
    assert screen(terminal.getvalue()) == [""] and terminal.getvalue().endswith("\r")


def test_a_bar_is_not_drawn_more_often_than_it_can_be_seen():
    terminal = Terminal()
    with Shown(LOG, terminal=terminal, every=60.0).phase("working") as phase:
        for done in range(1, 1001):
            phase.progress(done, 1000)
        phase.progress(1000, 1000)
    assert terminal.getvalue().count("/1000") == 1 and "1000/1000" in terminal.getvalue()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_ends_the_line(lines, error):
    terminal = Terminal()
    with pytest.raises(error), Shown(LOG, terminal=terminal).phase("working") as phase:
        phase.progress(3, 3)
        raise error
    assert screen(terminal.getvalue()) == [f"pfeife: working [{'#' * 30}] 3/3 failed", ""]
    assert not lines.records, "the error says it"


def test_who_is_shown_what(monkeypatch):
    """A bar needs a terminal, rank 0 and to be wanted; a log needs no one."""
    for stream, options in (
        (io.StringIO(), {}),
        (None, {}),
        (Terminal(), {"progress": False}),
        (Terminal(), {"rank": 1}),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        assert shown(LOG, **options).terminal is None
        with shown(LOG, **options).phase("working") as phase:
            assert phase.progress is None
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert shown(LOG).terminal is sys.stderr


def run_shown(monkeypatch, stream, **options):
    """Builds and runs a step of three stages with standard error going to a stream."""
    one = case("GPT")
    step = pfeife.compile(one.step, microbatches=2, stages=3, **options)
    monkeypatch.setattr(sys, "stderr", stream)
    step(*one.batch(4)).backward()
    monkeypatch.undo()
    return step


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_phase_of_a_build_has_a_bar(monkeypatch, replicas):
    terminal = Terminal()
    step = run_shown(monkeypatch, terminal, costs="measure", replicas=replicas)
    seen = terminal.getvalue()
    places = [seen.index(f"pfeife: {label} ...") for label in PHASES]
    assert places == sorted(places)
    count = len(step.backend.compiled[0].schedule.ranks[0])
    assert seen.rpartition("first step ")[2].startswith(f"[{'#' * 30}] {count}/{count}")
    assert re.search(r"measuring \[#{30}\] (\d+)/\1\b", seen)


def test_no_bar_without_a_terminal_or_by_an_option(monkeypatch):
    file, terminal = io.StringIO(), Terminal()
    run_shown(monkeypatch, file)
    torch._dynamo.reset()
    run_shown(monkeypatch, terminal, progress=False)
    assert file.getvalue() == terminal.getvalue() == ""
    with pytest.raises(ValueError, match="progress='no'"):
        pfeife.backend(progress="no")


def test_the_log_has_a_line_a_phase(lines):
    one = case("GPT")
    step = pfeife.compile(one.step, microbatches=2, stages=2, costs="measure")
    for seed in range(3):
        step(*one.batch(4, seed)).backward()
    *texts, last = [record.getMessage() for record in lines.records]
    assert [text.split(",")[0] for text in texts] == PHASES, "one line each, none for later steps"
    said = "compiled _words.<locals>.step: 2 stages on 2 ranks, 2 microbatches of 2 rows"
    assert last == said
    assert {record.levelno for record in lines.records} == {logging.INFO}
    compiled = step.backend.compiled[0]
    program = compiled.captured.program
    nodes = len(program.module.graph.nodes)
    assert re.fullmatch(
        rf"capturing, [\d.]+ s: {len(program.inputs)} inputs, {len(program.outputs)} outputs, "
        rf"{nodes} nodes",
        texts[0],
    )
    assert texts[1].endswith(f"s: {compiled.clusters.units} clusters")
    assert "s: 1f1b, " in texts[3] and report.summary(compiled.plan, compiled.program) in texts[3]
    assert "at the peak of the worst rank" in texts[3]
    step(*one.batch(8))
    later = [r.getMessage().split(",")[0] for r in lines.records[7:-1]]
    assert later == PHASES, "another shape"


def test_details_are_for_debugging(lines):
    LOG.setLevel(logging.DEBUG)
    one = case("GPT")
    step = pfeife.compile(one.step, microbatches=2, stages=2)
    step(*one.batch(4))
    compiled = step.backend.compiled[0]
    table = report.plan_table(compiled.plan, compiled.program)
    details = [r for r in lines.records if r.levelno == logging.DEBUG]
    assert any(table in record.getMessage() for record in details)


def test_a_loss_outside_is_shown_in_two_parts(monkeypatch, lines):
    one, terminal = case("GPT"), Terminal()
    model = pfeife.compile(one.model, microbatches=2, stages=2)
    tokens, targets = one.batch(4)
    monkeypatch.setattr(sys, "stderr", terminal)
    for _ in range(2):
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    monkeypatch.undo()
    labels = [record.getMessage().split(",")[0] for record in lines.records]
    compiled = "compiled GPT: 2 stages on 2 ranks"
    assert labels[-3:] == ["first forward", compiled, "first backward"]
    assert len(labels) == len(set(labels))
    count = len(model.backend.compiled[0].schedule.ranks[0])
    assert f"first backward [{'#' * 30}] {count}/{count}" in terminal.getvalue()


def test_a_search_says_how_much_of_its_time_is_over():
    program = pfeife.split_backward()(fused("GPT"))
    program = pfeife.annotate(estimate(program, machine("cpu-core")))(program)
    seen = []
    request = {"microbatches": 4, "ranks": 2, "schedule": "search", "search_seconds": 1.2}
    sched.plan(
        program,
        machine=machine("cpu-core"),
        progress=lambda *counts: seen.append(counts),
        **request,
    )
    assert seen and seen == sorted(seen)
    assert {total for _, total in seen} == {2} and {done for done, _ in seen} <= {0, 1, 2}


TRACED = """
import sys
sys.path.insert(0, {tests!r})
import attrs
import torch
torch.set_num_threads(1)
import pfeife
from models import case
from pfeife.data import plain
one = case("GPT")

def my_pass(program):
    return attrs.evolve(program)

options = {{"stages": 2, "schedule": "zb-h1", "devices": ["cpu"] * 2}}
step = pfeife.compile(one.step, microbatches=2, passes={{"stages": [my_pass]}}, **options)
step(*one.batch(4)).backward()
compiled = step.backend.compiled[0]
print(plain.to_json(compiled.plan), compiled.schedule.to_csv(), compiled.program, sep="====")
"""


def artifacts(folder: Path) -> dict[str, tuple[dict, str]]:
    """Our artifacts in torch's trace: by their name the record and the payload."""
    (path,) = folder.iterdir()
    found: dict[str, tuple[dict, list[str]]] = {}
    payload: list[str] = []
    for line in path.read_text().splitlines():
        if line.startswith("\t"):
            payload.append(line[1:])
        elif '"name": "pfeife_' in line:
            record = json.loads(line[line.index("{") :])
            payload = []
            name = record["artifact"]["name"].removeprefix("pfeife_")
            assert name not in found
            found[name] = (record, payload)
        else:
            payload = []
    return {name: (record, "\n".join(text)) for name, (record, text) in found.items()}


def on_a_terminal(command: list[str], env: dict[str, str], out: Path) -> str:
    """What a command draws on a real terminal that is its standard error."""
    ours, theirs = os.openpty()
    with out.open("w") as file:
        run = subprocess.Popen(command, env=env, stdout=file, stderr=theirs)
    os.close(theirs)
    limit = threading.Timer(200, run.kill)
    limit.start()
    drawn = b""
    with contextlib.suppress(OSError):  # so Linux says that the other end is closed
        while part := os.read(ours, 4096):
            drawn += part
    os.close(ours)
    status = run.wait()
    limit.cancel()
    assert status == 0, drawn.decode()
    return drawn.decode()


def test_every_stop_is_in_torchs_trace(tmp_path):
    """Under the compilation that Dynamo was in, though the program is built after it; on a real
    terminal, the same run draws its bars."""
    trace, out = tmp_path / "trace", tmp_path / "out"
    drawn = on_a_terminal(
        [sys.executable, "-c", TRACED.format(tests=str(Path(__file__).parent.parent))],
        env={**os.environ, "TORCH_TRACE": str(trace)},
        out=out,
    )
    assert all(f"pfeife: {label} ..." in drawn for label in PHASES if label != "measuring")

    found = artifacts(trace)
    programs = ["capture", "fuse", "split_backward", "annotate", "partition", "my_pass"]
    programs += ["insert_send_recv", "place"]
    assert list(found) == [*programs, "plan", "schedule", "timeline", "rank_0", "rank_1"]
    for record, _ in found.values():
        assert (record["frame_id"], record["frame_compile_id"], record["attempt"]) == (0, 0, 0)
    text = {name: payload for name, (_, payload) in found.items()}
    plan, csv, program = out.read_text().split("====")
    assert plain.from_json(Plan, text["plan"]) == plain.from_json(Plan, plan)
    assert Schedule.from_csv(text["schedule"]) == Schedule.from_csv(csv)
    assert text["place"].strip().endswith(program.strip())
    assert "send_stage_0_forward_to_1" in text["insert_send_recv"]
    assert "stage_1_forward" in text["partition"] and "send" not in text["partition"]
    assert " ms" in text["annotate"] and " ms" not in text["split_backward"].split("#")[0]
    events = json.loads(text["timeline"])["traceEvents"]
    actions = [(e["tid"], e["name"]) for e in events if e["ph"] == "X"]
    assert sorted(actions) == sorted(
        (rank, str(action))
        for rank, row in enumerate(Schedule.from_csv(csv).ranks)
        for action in row
    )
    parts = [re.findall(r"^%(\w+) :", text[f"rank_{rank}"], re.MULTILINE) for rank in (0, 1)]
    assert parts[0][:2] == ["stage_0_forward", "send_stage_0_forward_to_1"]
    assert parts[1][:2] == ["receive_stage_0_forward_on_1", "stage_1_forward"]
    assert not set(parts[0]) & set(parts[1])


def test_what_is_not_traced_is_not_written():
    """Once Dynamo has seen that there is no trace."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    asked = []
    _torch.trace_artifact("pfeife_none", "string", lambda: asked.append(1) or "", None)
    assert bool(asked) == ("TORCH_TRACE" in os.environ)
