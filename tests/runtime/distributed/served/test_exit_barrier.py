"""State that is asked for when other ranks have ended, or end meanwhile: real processes."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from share import whole

SCRIPT = str(Path(__file__).parents[3] / "staying.py")


def ended(folder: Path, how: str) -> tuple[list[int | None], dict[str, str]]:
    """Two ranks without torchrun, which would end both: their exit codes (None: not over in a
    minute), and the files that they have written."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(folder), how],
            env=os.environ | names | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]
    codes, end = list[int | None](), time.monotonic() + 60
    for rank in ranks:
        try:
            codes.append(rank.wait(max(0.0, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
            rank.kill()
            rank.wait()
    return codes, {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("how", ["ends", *map(whole, ("destroys", "exits"))])
def test_a_rank_whose_script_has_ended_still_answers(tmp_path, how):
    """It stays until the others have ended too; its exit code is its own."""
    codes, files = ended(tmp_path, how)
    assert codes == [0, 3 if how == "exits" else 0] and "right" in files, files


@pytest.mark.whole
def test_a_rank_whose_script_has_ended_makes_no_step(tmp_path):
    codes, files = ended(tmp_path, "goes on")
    assert codes == [1, 0], (codes, files)
    assert files["told"].startswith("rank 1: its program has ended while rank 0 waited"), files


@pytest.mark.whole
@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_a_rank_that_is_gone_while_it_is_asked(tmp_path, how):
    codes, files = ended(tmp_path, how)
    assert codes == [1, 1 if how == "raises" else -9], (codes, files)
    assert files["told"].startswith("rank 1: its process is gone while rank 0 waited"), files
    assert "state_dict()" in files["told"], files
