"""A module of the package runs in a process of its own."""

import signal
import subprocess

from pfeife.data import processes


def test_it_finds_the_package_and_can_be_ended(tmp_path, monkeypatch):
    """From any folder, whatever the caller's script is."""
    monkeypatch.chdir(tmp_path)
    process = processes.start("pfeife", "--version", stdout=subprocess.PIPE, text=True)
    assert process.communicate()[0].startswith("pfeife ") and process.returncode == 0
    sleep = ("-n1", "-r1", "import time; time.sleep(600)")
    waiting = processes.start("timeit", *sleep, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    processes.stop([process, waiting])
    assert waiting.returncode == -signal.SIGKILL
