"""The examples run, and check themselves."""

import runpy
import sys
from pathlib import Path

import pytest
from processes import bounded

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


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


def test_a_compiler_of_ones_own(run):
    assert "3 of 3 losses are the same" in run("own_compiler.py")


def test_a_plan_recorded_in_one_process_is_used_by_two(run, tmp_path):
    path = str(tmp_path / "plan.json")
    assert "the same loss" in run("plan_once.py", "--record", path)
    said = on_ranks("plan_once.py", "--use", path)
    assert said.count("the same loss, bit for bit") == 2


@pytest.mark.whole
def test_training_in_one_process(run):
    said = run("train_gpt.py", "--steps", "3", "--stages", "2")
    assert "3 of 3 losses are the same, bit for bit" in said


def test_training_on_two_ranks():
    assert "3 of 3 losses are the same, bit for bit" in on_ranks("train_gpt.py", "--steps", "3")
