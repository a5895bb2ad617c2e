"""What becomes of a step when something fails: real processes, then threads of one process."""

from pathlib import Path

from processes import bounded
from share import WHOLE

ROOT = Path(__file__).parent.parent


def test_a_rank_that_fails():
    """All survivors stop in time and blame the right one; the next step has the right bits. Twice,
    if need be: on a busy machine a survivor may be ended before it has told its reason."""
    command = [str(ROOT / "benchmarks" / "faults.py"), "--quick", "--reaction", "30"]
    code, out, error = bounded(command, 280)
    if code != 0:
        code, out, error = bounded(command, 280)
    assert code == 0, out[-4000:] + error[-6000:]
    assert " 0 ended wrong" in out


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
