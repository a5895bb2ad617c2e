"""Processes that tests start."""

import os
import signal
import subprocess
import sys

import pytest


def bounded(command, seconds, **environment):
    """The finished command; it is killed with all its processes when the time is up."""
    run = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment},
    )
    try:
        out, error = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        out, error = run.communicate()
        pytest.fail(f"not over after {seconds} s:\n{out[-3000:]}{error[-6000:]}")
    return run.returncode, out, error
