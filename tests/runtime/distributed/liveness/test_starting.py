from pathlib import Path

from processes import bounded

TESTS = Path(__file__).parents[3]
FAILING = """
import os
from pfeife.runtime.distributed.process_group import join_world
import torch
if os.environ["RANK"] == "1":
    os.environ["GLOO_SOCKET_IFNAME"] = "missing0"
join_world(torch.device("cpu"))
"""


def test_a_start_that_fails_on_one_rank_ends_all(tmp_path):
    """The other one is in a call that would wait for half an hour."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    path = f"{TESTS.parent}:{TESTS}"
    code, out, error = bounded(["-m", "forked", "2", str(script)], 60, PYTHONPATH=path)
    said = out + error
    assert code and "GLOO_SOCKET_IFNAME names the interface" in said, said[-3000:]
    assert "rank 0 ends: rank 1" in said, said[-3000:]
