"""Rows in processes of their own: a crash or a hang loses one row, and a fresh process goes on.

    parent  --name of a row-->  stdin of a worker
            <--a line of JSON--  what it says of it; what the row prints goes to a file

A worker keeps torch, and what rows have in common, from row to row. After an error it is replaced:
the errors of a GPU stay with the process.
"""

import contextlib
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch

from gpu.rows import Figures, Setting, Skipped, Verdict, Wrong, row_called, rows_of

LONGEST = 300  # characters of a cause


class Worker:
    """A process that runs one row after another, `apart` in a group of processes of its own."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], apart: bool = True):
        self.apart = apart
        # What rows print, and how a process dies.
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            text=True,
            env=os.environ | environment,
            start_new_session=apart,  # then what it starts ends with it
        )
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.usable = True

    def _listen(self) -> None:
        for line in self.process.stdout or ():
            self.answers.put(line)
        self.answers.put("")

    def ask(self, name: str, seconds: float) -> Verdict:
        """What is said of a row; a worker that does not answer in time is ended."""
        start = time.monotonic()
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(f"{name}\n")
            self.process.stdin.flush()
            answer = self.answers.get(timeout=seconds)
        except queue.Empty:
            self.end()
            why = f"no end after {seconds:.0f} s: {self._last()}"
            return Verdict(name, "timeout", time.monotonic() - start, why)
        except OSError:
            answer = ""
        if not answer:
            code = self.process.wait()
            self.end()
            why = f"the process ended with {code}: {self._last()}"
            return Verdict(name, "error", time.monotonic() - start, why)
        found = Verdict(**json.loads(answer))
        if found.verdict == "error":
            self.end()
        return found

    def _last(self) -> str:
        """The last that was printed."""
        self.said.seek(0)
        lines = [line.strip() for line in self.said.read().splitlines() if line.strip()]
        return short(" | ".join(lines[-3:]))

    def end(self) -> None:
        self.usable = False
        with contextlib.suppress(ProcessLookupError):
            if self.apart:
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
        self.process.wait()


def short(text: str) -> str:
    """Its two ends, in one line."""
    line, half = " ".join(text.split()), LONGEST // 2
    return line if len(line) <= LONGEST else f"{line[:half]} ... {line[-half:]}"


@attrs.frozen
class Together:
    """Runs rows in workers side by side, and `tells` of each as it ends. Nothing begins after the
    `deadline` (time.monotonic), and nothing lasts longer."""

    make: Callable[[], Worker]
    deadline: float
    tells: Callable[[Verdict], None]

    def __call__(self, rows: Mapping[str, float], first: Worker, workers: int) -> None:
        """Rows with their limits in seconds; `first` is a worker that is there already."""
        waiting: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()
        for named in rows.items():
            waiting.put(named)
        threads = [
            threading.Thread(target=self._work, args=(waiting, None if index else first))
            for index in range(min(workers, len(rows)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, waiting: "queue.SimpleQueue[tuple[str, float]]", worker: Worker | None) -> None:
        while not waiting.empty():
            try:
                name, seconds = waiting.get_nowait()
            except queue.Empty:
                break
            left = self.deadline - time.monotonic()
            if left < 1:
                self.tells(Verdict(name, "skipped", why="no time was left"))
                continue
            if worker is None or not worker.usable:
                worker = self.make()
            verdict = worker.ask(name, min(seconds, left))
            if verdict.verdict == "timeout" and left < seconds:
                verdict = Verdict(name, "skipped", verdict.seconds, "no time was left to end it")
            self.tells(verdict)
        if worker is not None:
            worker.end()


def serve(run: Callable[[str], Figures]) -> None:
    """What a worker does: what it is asked for, by a name a line, each answered by a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what rows print is no answer
    for line in sys.stdin:
        verdict = _tried(line.strip(), run)
        print(json.dumps(attrs.asdict(verdict)), file=answers, flush=True)


def run_row(name: str, setting: Setting) -> Figures:
    """What a row gives; for `?PART` the names of the part's rows, with their limits in seconds."""
    if name.startswith("?"):
        part = name.removeprefix("?")
        return {f"{part}/{row.name}": row.seconds for row in rows_of(part)}
    row = row_called(name)
    if row.cuda and not setting.cuda:
        raise Skipped("only a GPU can say")
    if row.devices > len(setting.devices):
        raise Skipped(f"{len(setting.devices)} of {row.devices} devices are here")
    torch.compiler.reset()  # rows compile the same functions for other models
    try:
        return row.run(setting)
    finally:
        gc.collect()
        if setting.cuda:
            torch.cuda.empty_cache()  # for the processes beside this one


def _tried(name: str, run: Callable[[str], Figures]) -> Verdict:
    start = time.perf_counter()

    def verdict(word: str, why: str, figures: Figures) -> Verdict:
        return Verdict(name, word, time.perf_counter() - start, why, dict(figures))

    try:
        return verdict("right", "", run(name))
    except Wrong as wrong:
        return verdict("wrong", str(wrong), wrong.figures)
    except Skipped as reason:
        return verdict("skipped", short(str(reason)), {})
    except Exception as error:
        traceback.print_exc()
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        return verdict("error", short(f"{where}: {type(error).__name__}: {error}"), {})
