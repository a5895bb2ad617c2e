"""Some of the generated training loops of `benchmarks/loops.py`: right, or stopped with words."""

from pathlib import Path

import pytest
from processes import bounded
from share import whole

LOOPS = Path(__file__).parent.parent / "benchmarks" / "loops.py"


@pytest.mark.parametrize(("ranks", "count"), [whole(1, 60), whole(2, 30)])
def test_loops(ranks, count):
    """Each is equal to plain eager accumulation or ends with a documented error, in time."""
    command = [str(LOOPS), "--ranks", str(ranks), "--count", str(count)]
    code, out, error = bounded([*command, "--limit", "60"], 900)
    assert code == 0, out[-6000:] + error[-3000:]
    assert f"{count} loops, 0 wrong" in out
