"""The examples run, and check themselves."""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
from logged import logged
from processes import bounded
from share import whole

EXAMPLES = Path(__file__).parent.parent / "examples"
STARTED = sorted(path for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text())
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


# What is said to an example that runs in one process, and what it says.
SAME = "3 of 3 losses are the same"
ALONE: dict[str, tuple[list[str], str]] = {
    "default_backend.py": ([], "default backend"),
    "elastic.py": (["runs"], "rank 0 has logged"),
    "explain.py": ([], "mended is captured by Dynamo as one graph"),
    "four_machines.py": ([], "the fastest of 4 machines is b200-hgx"),
    "hf_accelerate.py": ([], "rank 0 has logged"),
    "hf_lora.py": ([], "rank 0 has logged"),
    "hf_trainer.py": ([], "rank 0 has logged"),
    "lightning_gpt.py": ([], "rank 0 has logged"),
    "nanogpt.py": ([], "rank 0 has logged"),
    "offload.py": ([], "bit for bit: True"),
    "other_backend.py": ([], f"{SAME}, with all gradients"),
    "own_compiler.py": ([], SAME),
    "own_transport.py": ([], f"{SAME}, with all gradients"),
    "resume.py": (["runs"], "rank 0 has logged"),
    "paper_family.py": ([], "three steps have the gradients of plain accumulation"),
    "plan_once.py": (["--record", "plan.json"], "the same loss"),
    "small_messages.py": ([], "all within their bounds"),
    "torch_csv.py": ([], "the same schedule: True"),
    "train_gpt.py": (["--steps", "3", "--stages", "2"], f"{SAME}, bit for bit"),
}


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example in this process, as `python` would; what it prints. Fails if it ends with an
    error."""

    def one(name: str, *arguments: str) -> str:
        script = str(EXAMPLES / name)
        monkeypatch.syspath_prepend(EXAMPLES)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            assert not end.code, end.code
        return capsys.readouterr().out

    return one


def on_ranks(name: str, *arguments: str) -> str:
    """What an example prints on two ranks."""
    code, out, error = bounded([*TORCHRUN, str(EXAMPLES / name), *arguments], 300)
    assert code == 0, error
    return out


HERE = [
    "default_backend.py",
    "own_compiler.py",
    "paper_family.py",
    "small_messages.py",
    "torch_csv.py",
]


@pytest.mark.parametrize("name", [*HERE, whole("train_gpt.py")])
def test_in_this_process(run, name):
    arguments, said = ALONE[name]
    assert said in run(name, *arguments)


@pytest.mark.whole
@pytest.mark.parametrize("path", STARTED, ids=lambda path: path.name)
def test_as_somebody_starts_it(tmp_path, monkeypatch, path):
    """In an interpreter that has nothing but the example."""
    arguments, said = ALONE[path.name]
    monkeypatch.chdir(tmp_path)
    code, out, error = bounded([str(path), *arguments], 300)
    assert code == 0, error
    assert said in out


@pytest.mark.whole
def test_a_plan_recorded_in_one_process_is_used_by_two(run, tmp_path):
    path = str(tmp_path / "plan.json")
    assert "the same loss" in run("plan_once.py", "--record", path)
    said = on_ranks("plan_once.py", "--use", path)
    assert said.count("the same loss, bit for bit") == 2


@pytest.mark.whole  # `distributed/loops.py` has it among its rows
def test_training_on_two_ranks():
    assert f"{SAME}, bit for bit" in on_ranks("train_gpt.py", "--steps", "3")


@pytest.mark.whole
def test_the_demo_leaves_a_page(run, tmp_path):
    page = tmp_path / "demo.html"
    said = run("train_gpt.py", "--steps", "2", "--stages", "2", "--report", str(page))
    assert f"look at {page}" in said and "On one H100" in said
    assert "measured" in page.read_text()


DEATHS = {
    "raises, with a message unread": (
        "queues[0, 1].put(bytes(10**7)); raise OSError('the disk is full')",
        "OSError: the disk is full",
    ),
    "is killed": ("import os; os.kill(os.getpid(), 9)", "terminated with signal SIGKILL"),
}


@pytest.mark.whole
@pytest.mark.parametrize("death", DEATHS)
def test_a_process_that_dies_ends_the_others(tmp_path, death):
    """Also one whose messages nobody reads, and one that waits for others for ever."""
    does, said = DEATHS[death]
    text = (EXAMPLES / "own_transport.py").read_text()
    border = "        optimizer.step()\n"
    assert text.count(border) == 1
    waits = "threading.Event().wait()"
    mine = f"{border}        import threading\n        if rank: {waits}\n        {does}\n"
    script = tmp_path / "own_transport.py"
    script.write_text(text.replace(border, mine))
    path = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
    code, _, error = bounded([str(script)], 300, PYTHONPATH=path)
    assert code and said in error, error


@pytest.mark.whole
def test_a_run_that_is_interrupted(run, tmp_path):
    """On two ranks, and goes on in one process."""

    def losses(*arguments: str) -> list[float]:
        said = run("resume.py", *arguments)
        return json.loads(said.partition("has logged ")[2])

    whole_run = losses(str(tmp_path / "whole"))
    halves = logged("resume.py", tmp_path / "halves", "--steps", "5", ranks=2)
    assert halves == [whole_run[:5]] * 2
    assert losses(str(tmp_path / "halves")) == whole_run[5:]


@pytest.mark.whole
def test_a_run_that_goes_on_with_more_ranks(tmp_path):
    (first,) = logged("resume.py", tmp_path, "--steps", "5")
    (second,) = logged("resume.py", tmp_path / "whole")
    assert logged("resume.py", tmp_path, ranks=2) == [second[5:]] * 2 and first == second[:5]


@pytest.mark.whole
def test_a_loop_as_nanogpt_has_it(tmp_path):
    """Within rounding: one device does not cut its batches. It goes on from its checkpoint."""
    (expected,) = logged("nanogpt.py", "--one-device")
    found = logged("nanogpt.py", "--save", tmp_path / "half.pt", ranks=2)
    for one in found:
        for mine, theirs in zip(one, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
    again = logged("nanogpt.py", "--resume", tmp_path / "half.pt", ranks=2)
    assert again == [one[4:] for one in found]
