"""Real processes over Gloo on loopback; what they check stands in ranks.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

HERE = Path(__file__).parent


@pytest.mark.parametrize("world", [2, 4])
def test_ranks(world, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world), str(HERE / "ranks.py"), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    for rank in range(world):
        done = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert done == list(ranks.checks(world))
