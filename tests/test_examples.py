"""The examples run, and check themselves."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*command: str) -> str:
    """What an example prints. Fails if it ends with an error."""
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_compiler_of_ones_own():
    assert "3 of 3 losses are the same" in run(str(EXAMPLES / "own_compiler.py"))


def test_a_plan_recorded_in_one_process_is_used_by_two(tmp_path):
    script, path = str(EXAMPLES / "plan_once.py"), str(tmp_path / "plan.json")
    assert "the same loss" in run(script, "--record", path)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = run(*torchrun, script, "--use", path)
    assert said.count("the same loss, bit for bit") == 2
