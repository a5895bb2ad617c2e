"""What is left of a process that ends itself."""

import subprocess
import sys

from pfeife.runtime.distributed import ending

PROGRAM = """
import atexit, runpy, sys

atexit.register(print, "at exit", end="")
print("half a line", end="", file=sys.stderr)
runpy.run_path(sys.argv[1])["end_process"]()
"""


def test_nothing_that_was_written_is_lost():
    """Also what waits in a buffer for the end of its line."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, ending.__file__], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "at exit", "half a line")
