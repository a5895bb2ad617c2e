"""Every stop of a program is an artifact in torch's trace."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

from listening import PHASES

from pfeife.data import plain
from pfeife.data.plan import Plan
from pfeife.data.schedule import Schedule

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
        [sys.executable, "-c", TRACED.format(tests=str(Path(__file__).parents[2]))],
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
    actions = [(e["pid"], e["name"]) for e in events if e["ph"] == "X" and e["cat"] != "wait"]
    assert sorted(actions) == sorted(
        (rank, str(action))
        for rank, row in enumerate(Schedule.from_csv(csv).ranks)
        for action in row
    )
    parts = [re.findall(r"^%(\w+) :", text[f"rank_{rank}"], re.MULTILINE) for rank in (0, 1)]
    assert parts[0][:2] == ["stage_0_forward", "send_stage_0_forward_to_1"]
    assert parts[1][:2] == ["receive_stage_0_forward_on_1", "stage_1_forward"]
    assert not set(parts[0]) & set(parts[1])
