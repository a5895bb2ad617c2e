"""Processes of our own modules, started anew: nothing is forked, and the caller's script does not
run again."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def start(module: str, *arguments: str, **streams: Any) -> subprocess.Popen:
    """A process that runs one of the package's modules."""
    # The package is found where this process has it from, installed or not.
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        **streams,
    )


def stop(processes: list[subprocess.Popen]) -> None:
    """Ends those that still run, and closes what leads to them."""
    for process in processes:
        process.kill()  # does nothing to one that has ended
        process.wait()
        for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
            stream.close()
