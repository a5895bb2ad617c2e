"""Two agents of torchrun, of which one is gone for good: the other goes on by itself."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from logged import EXAMPLES, logged

CONF = "keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=15"
STEPS = "60"


def agent(folder: Path, port: int, ranks: int, host: bool) -> subprocess.Popen:
    """torchrun on one of two machines."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"]
    command += ["--nproc-per-node", str(ranks), "--max-restarts", "3", "--rdzv-backend", "c10d"]
    command += ["--rdzv-id", "run", "--rdzv-endpoint", f"localhost:{port}"]
    command += ["--rdzv-conf", f"{CONF},is_host={int(host)}"]
    command += [str(EXAMPLES / "elastic.py"), str(folder), "--steps", STEPS]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port: int = one.getsockname()[1]
        return port


def children(process: int) -> list[int]:
    threads = Path(f"/proc/{process}/task").glob("*/children")
    return [int(one) for thread in threads for one in thread.read_text().split()]


def end(one: subprocess.Popen) -> None:
    """As if its machine were gone: the agent and its ranks, which are in sessions of their own."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(one.pid, signal.SIGSTOP)  # it starts nothing any more
        for process in [*children(one.pid), one.pid]:
            os.kill(process, signal.SIGKILL)
    if one.stdout is not None and not one.stdout.closed:
        one.communicate()


@pytest.mark.whole
def test_a_machine_that_is_gone(tmp_path):
    """Three ranks, then two: the curve is that of one process."""
    (expected,) = logged("elastic.py", tmp_path / "alone", "--steps", STEPS)
    port, folder = free_port(), tmp_path / "runs"
    first = agent(folder, port, 2, host=True)
    second = agent(folder, port, 1, host=False)
    try:
        deadline = time.monotonic() + 200
        while not (folder / "step-00000010").exists():
            assert time.monotonic() < deadline and first.poll() is None and second.poll() is None
            time.sleep(0.01)
        end(second)
        out, error = first.communicate(timeout=300)
    finally:
        end(second)
        end(first)
    assert first.returncode == 0, error
    begun = [
        tuple(map(int, one)) for one in re.findall(r"rank 0 of (\d) begins at step (\d+)", out)
    ]
    (before, zero), (after, start) = begun
    assert (before, after, zero) == (3, 2, 0) and 10 <= start < int(STEPS)
    assert "PipelineError: rank 2" in error
    said = re.findall(r"rank \d has logged (\[.*?\])", out)
    assert [json.loads(one) for one in said] == [expected[start:]] * 2
