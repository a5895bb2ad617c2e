"""Nobody's generators move, and losses are those of one process: `generators.py`, twice."""

import os
import re
import sys
from pathlib import Path

from processes import bounded

SCRIPT = str(Path(__file__).with_name("generators.py"))


def losses(folder: Path, ranks: int) -> list[str]:
    """What each rank says, in a launch of its own: the first connection is among what is tried."""
    folder.mkdir()
    start = [] if ranks == 1 else ["-m", "forked", str(ranks)]
    path = os.pathsep.join(sys.path)
    code, out, error = bounded([*start, SCRIPT, str(folder)], 200, PYTHONPATH=path)
    assert code == 0, out + error
    found = re.findall(r"rank \d has the losses (\[.*\])$", out, re.MULTILINE)
    assert len(found) == ranks, out
    return found


def test_no_generator_moves_and_losses_are_those_of_one_process(tmp_path):
    expected = losses(tmp_path / "alone", 1)
    assert losses(tmp_path / "ranks", 2) == expected * 2
