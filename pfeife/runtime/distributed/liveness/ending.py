"""The end of a process whose main thread does not come out of what it is in."""

import atexit
import os
import sys
import threading
from concurrent.futures import thread as pools
from typing import NoReturn

from pfeife.runtime.threads import started

CHANCE = 5.0  # seconds for the other threads to end, and again for what is registered with atexit


def end_process() -> NoReturn:
    """Ends this process as failed. As at the end of any program the other threads, which may
    write a checkpoint, and what is registered with atexit come first, but not for long."""
    for work in (_join_threads, atexit._run_exitfuncs):  # there is no public way to run these
        started("ending", work).join(CHANCE)
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(1)


def _join_threads() -> None:
    pools._python_exit()  # else the threads of a pool wait for more work
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()
