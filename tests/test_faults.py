"""What becomes of a step when a process fails: real processes."""

import re
from pathlib import Path

from processes import bounded
from share import WHOLE

ROOT = Path(__file__).parent.parent


def test_a_rank_that_fails(record_property):
    """All survivors stop in time and blame the right one; the next step has the right bits. On a
    busy machine a survivor may be ended before it has told its reason: a few launches may be done
    twice, and the summary of the tests says how many."""
    command = [str(ROOT / "benchmarks" / "faults.py"), "--quick", "--reaction", "30"]
    code, out, error = bounded([*command, "--again", "3"], 400)
    assert code == 0, out[-4000:] + error[-6000:]
    counts = re.findall(r"(\d+) (?:trials|ended|launches)", out.splitlines()[-1])
    trials, wrong, again = map(int, counts)
    assert trials > 100 and not wrong
    if again:
        record_property("done twice", f"{again} launches of benchmarks/faults.py")


def test_torchrun_starts_again_from_a_checkpoint(tmp_path):
    losses = {}
    for fault in ("none", "SIGKILL", *["exception"] * WHOLE):
        (tmp_path / fault).mkdir()
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        script = str(ROOT / "tests" / "restart.py")
        command += ["--max-restarts", "1", script, str(tmp_path / fault), fault]
        code, _, error = bounded(command, 200)
        assert code == 0, error[-4000:]
        assert ("failed (exitcode" in error) == (fault != "none")
        losses[fault] = [(tmp_path / fault / f"loss {rank}").read_text() for rank in range(2)]
    assert all(found == losses["none"] for found in losses.values())
