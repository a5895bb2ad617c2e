"""Ranks that are forked from one warm process, so that starting them costs no import of torch.

    python -m forked 2 examples/nanogpt.py --save half.pt

runs a script on two of them, as torchrun does, once what it imports is there.

They are real processes: an exception that nobody catches leaves the frames of the parent, which
hold nothing to clean up, and ends the interpreter as it ends any program.
"""

import ast
import functools
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist
from torch import hub

# Every connection to a store asks for the name of the other end; a name server that is slow is
# not what is tried here.
PATIENCE = {"RES_OPTIONS": "timeout:1 attempts:1"}
GRACE = 15.0  # seconds for the others when a rank has ended badly
Report = Callable[..., None]
Main = Callable[[int, Report], None]


class Agent:
    """Keeps the store of all ranks in a process of its own, as torchrun's agent does."""

    def __init__(self) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.environ.update(PATIENCE)
            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            os.write(write, f"{store.port}\n".encode())
            os.close(write)
            signal.pause()
        os.close(write)
        with open(read) as port:
            self.port = int(port.readline())

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@attrs.define(eq=False)
class Rank:
    """One process: its exit code (negative for a signal) and when it ended, once it has."""

    pid: int
    reports: int
    log: Path
    code: int | None = None
    ended: float = 0.0


class Launch:
    """Ranks that run `main(rank, report)` at the same time, each with torchrun's variables.

    `report` takes keywords and keeps them, with the rank and the time (of time.monotonic).
    """

    def __init__(
        self,
        size: int,
        main: Main,
        *,
        seconds: float,
        agent: bool = True,
        absent: tuple[int, ...] = (),
    ):
        self.folder = Path(tempfile.mkdtemp(prefix="pfeife-faults-"))
        self.end = time.monotonic() + seconds
        self.ranks: dict[int, Rank] = {}
        self.agent = Agent() if agent else None
        environment = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.agent.port if self.agent else _free_port()),
            "TORCHELASTIC_USE_AGENT_STORE": str(agent),
            **PATIENCE,
        }
        for rank in sorted(set(range(size)) - set(absent)):
            reports, log = self.folder / f"{rank}.json", self.folder / f"{rank}.log"
            out = os.open(reports, os.O_CREAT | os.O_RDWR | os.O_APPEND)
            pid = os.fork()
            if pid == 0:
                os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
                # A shell's background jobs ignore it, and so would their children.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                _own_lock()
                _write_to(log)
                main(rank, _reporter(out, rank))
                sys.exit(0)
            self.ranks[rank] = Rank(pid, out, log)

    def poll(self) -> bool:
        """Whether all have ended. Those that live when the time is up are killed."""
        for one in self.ranks.values():
            if one.code is None:
                if time.monotonic() > self.end:
                    os.kill(one.pid, signal.SIGKILL)
                pid, status = os.waitpid(one.pid, os.WNOHANG)
                if pid:
                    one.code, one.ended = os.waitstatus_to_exitcode(status), time.monotonic()
        return all(one.code is not None for one in self.ranks.values())

    def wait(self, grace: float) -> dict[int, int]:
        """Until all have ended, at the latest so many seconds after one that has ended badly;
        returns the exit codes of those."""
        while not self.poll():
            time.sleep(0.05)
            if any(one.code for one in self.ranks.values()):
                self.end = min(self.end, time.monotonic() + grace)
        return {rank: one.code for rank, one in self.ranks.items() if one.code}

    @property
    def late(self) -> bool:
        return time.monotonic() > self.end

    def living(self) -> list[int]:
        return [rank for rank, one in self.ranks.items() if one.code is None]

    def signal(self, rank: int, what: signal.Signals) -> None:
        os.kill(self.ranks[rank].pid, what)

    def reports(self) -> list[dict[str, Any]]:
        """All that was reported so far, in the order of time."""
        found = []
        for one in self.ranks.values():
            text = os.pread(one.reports, os.fstat(one.reports).st_size, 0).decode()
            found += [json.loads(line) for line in text.splitlines()]
        return sorted(found, key=lambda report: report["time"])

    def close(self) -> str:
        """Forgets the launch; returns what the ranks have written to their standard error."""
        if self.agent:
            self.agent.end()
        text = ""
        for rank, one in self.ranks.items():
            os.close(one.reports)
            lines = one.log.read_text(errors="replace").splitlines()
            text += "".join(f"[{rank}] {line}\n" for line in lines)
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()
        return text


def _own_lock() -> None:
    """fx's Interpreter makes a tqdm bar, shown or not, under a lock that forked processes share:
    whoever is killed with it would stop all that come later."""
    if hasattr(hub.tqdm, "set_lock"):
        hub.tqdm.set_lock(threading.RLock())


def _write_to(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _reporter(out: int, rank: int) -> Report:
    def report(**values: Any) -> None:
        line = json.dumps({"rank": rank, "time": time.monotonic(), **values}) + "\n"
        os.write(out, line.encode())

    return report


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def import_as(script: Path) -> None:
    """Imports what a script does, before it runs."""
    for one in ast.parse(script.read_text()).body:
        if isinstance(one, ast.Import):
            for name in one.names:
                importlib.import_module(name.name)
        if isinstance(one, ast.ImportFrom) and one.module:
            module = importlib.import_module(one.module)
            for name in one.names:
                getattr(module, name.name)  # some packages load only now what they name


def main(ranks: int, script: Path, arguments: Sequence[str]) -> int:
    """Runs a script on so many ranks; returns 1 if one of them ended badly."""
    sys.path[0], sys.argv = str(script.parent), [str(script), *arguments]
    import_as(script)
    names = {"TORCHELASTIC_RUN_ID": "forked", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ.update(names)
    run = functools.partial(runpy.run_path, str(script), run_name="__main__")
    launch = Launch(ranks, lambda *_: run(), seconds=900)
    bad = launch.wait(GRACE)
    print(launch.close(), *(f"rank {rank} ended with {code}" for rank, code in bad.items()))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
