"""Ranks that fail: real processes, killed, stopped, failing in every way at many actions.

The trials are those of benchmarks/faults.py, which does all of them at every action.
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_all_ranks_stop_together():
    # Torch's store asks the resolver for the names of its peers, and a lost answer takes 5 s.
    command = [sys.executable, str(HERE.parent / "benchmarks" / "faults.py")]
    command += ["--quick", "--reaction", "30"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]


def test_torchrun_starts_again_from_a_checkpoint(tmp_path):
    losses = {}
    for fault in ("none", "SIGKILL", "exception"):
        (tmp_path / fault).mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "--max-restarts", "1"]
        command += [str(HERE / "restart.py"), str(tmp_path / fault), fault]
        run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert run.returncode == 0, run.stderr[-4000:]
        assert ("failed (exitcode" in run.stderr) == (fault != "none")
        losses[fault] = [(tmp_path / fault / f"loss {rank}").read_text() for rank in range(2)]
    assert losses["SIGKILL"] == losses["exception"] == losses["none"]
