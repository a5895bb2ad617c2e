"""benchmarks/gpu.py without a GPU: it refuses in a sentence, and its rows run on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


def run(*arguments, code):
    command = [sys.executable, str(FILE), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_refuses_in_one_sentence(tmp_path):
    said = run("--json", tmp_path / "found.json", code=2)
    assert said.count("\n") == 1 and "there is no CUDA GPU" in said
    written = json.loads((tmp_path / "found.json").read_text())
    assert "no CUDA GPU" in written["refused"] and written["rows"] == []


def test_a_row_on_the_cpu(tmp_path):
    chosen = "--device", "cpu", "--parts", "correctness", "--only", "dropout zb-h1 one device"
    said = run(*chosen, "--json", tmp_path / "found.json", code=0)
    assert "| correctness/dropout by zb-h1 on one device twice | right |" in said
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["verdict"] == "right" and row["figures"]["bitwise"] is True
