"""What is left of a process that ends itself."""

import subprocess
import sys

from pfeife.runtime.distributed.liveness import ending

PROGRAM = """
import logging  # which would write all that waits at the end of the program
import atexit, runpy, sys, time

atexit.register(time.sleep, 60)
atexit.register(print, "at exit", end="")
print("half a line", end="", file=sys.stderr)
end_process = runpy.run_path(sys.argv[1])["end_process"]
end_process.__globals__["CHANCE"] = 0.2
end_process()
"""


def test_nothing_that_was_written_is_lost():
    """Also what waits for the end of its line, where something else at exit takes too long."""
    ended = subprocess.run(
        [sys.executable, "-E", "-c", PROGRAM, ending.__file__],  # buffered, whatever is set here
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "at exit", "half a line")
