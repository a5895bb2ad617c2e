"""Plans of one program in several processes, each of which plans what is asked of it in turn."""

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import attrs

from pfeife.commands.answers import in_a_line
from pfeife.commands.plan import question_of
from pfeife.commands.programs import Captures, save, saved
from pfeife.data import processes

# Nodes of programs to plan for each process: a thousand take about half a second, and to start a
# process takes six.
_WORTHWHILE = 20_000


@attrs.frozen
class Figures:
    """Those of a plan; or the reason that there is none."""

    step_seconds: float = 0.0
    per_second: float = 0.0
    utilization: float = 0.0
    bubble: float = 0.0
    peak_bytes: int = 0
    refused: str = ""


Planner = Callable[[argparse.Namespace], Figures]


def planned(captures: Captures, options: argparse.Namespace) -> Figures:
    """The figures of the plan that options ask for."""
    try:
        question = question_of(options)  # before a capture, which what cannot be needs none of
        forecast = captures.outlook(options, question).forecast
    except ValueError as error:
        return Figures(refused=in_a_line(error))
    return Figures(
        forecast.step_seconds,
        forecast.tokens_per_second or forecast.samples_per_second,
        forecast.utilization,
        forecast.bubble,
        forecast.peak_bytes,
    )


def each_planned(
    captures: Captures, questions: Sequence[argparse.Namespace]
) -> Iterator[tuple[int, Figures]]:
    """The figures of all plans, with their numbers, as they are made.

    Where that will take long, as many processes as there are cores take part, each with the program
    that this one has captured:

        this process    capture, plan 0, plan 1, plan 4, ...
        another                  (starts) plan 2, plan 3, ...
    """
    by_size: dict[Any, list[int]] = {}
    for number, options in enumerate(questions):
        by_size.setdefault(captures.size(options), []).append(number)
    for numbers in by_size.values():
        yield from _of_one_size(captures, questions, numbers)


def _of_one_size(
    captures: Captures, questions: Sequence[argparse.Namespace], numbers: Sequence[int]
) -> Iterator[tuple[int, Figures]]:
    """Those of one program."""
    own: Planner = partial(planned, captures)
    asked = [questions[number] for number in numbers]
    with _helpers(captures, asked[0], _helpful(captures, asked)) as helpers:
        idle: queue.SimpleQueue[Planner] = queue.SimpleQueue()
        for planner in [own, *helpers]:
            idle.put(planner)

        def answered(number: int) -> tuple[int, Figures]:
            planner = idle.get()
            try:
                return number, planner(questions[number])
            finally:
                idle.put(planner)

        with ThreadPoolExecutor(1 + len(helpers)) as threads:
            yield from threads.map(answered, numbers)


def _helpful(captures: Captures, asked: Sequence[argparse.Namespace]) -> int:
    """How many other processes make plans of one program faster."""
    possible = list(filter(_is_question, asked))
    try:
        program = captures.of(possible[0]).program if possible else None
    except ValueError:  # which each plan will say
        return 0
    nodes = len(program.module.graph.nodes) if program else 0
    return min((os.cpu_count() or 1) - 1, len(possible) * nodes // _WORTHWHILE, len(asked) - 1)


def _is_question(options: argparse.Namespace) -> bool:
    try:
        question_of(options)
    except ValueError:
        return False
    return True


@contextmanager
def _helpers(
    captures: Captures, options: argparse.Namespace, count: int
) -> Iterator[list[Planner]]:
    """Processes that plan the program which options ask for."""
    if not count:
        yield []
        return
    with tempfile.TemporaryDirectory() as name, ExitStack() as files:
        folder, started = Path(name), list[subprocess.Popen]()
        program = folder / "program.json"
        save(captures.of(options).program, str(program), {})
        try:
            planners: list[Planner] = []
            for number in range(count):
                errors = files.enter_context((folder / f"{number}.err").open("w+"))
                streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
                process = processes.start(__name__, str(program), text=True, **streams)
                started.append(process)
                planners.append(_asking(process, errors))
            yield planners
        finally:
            processes.stop(started)


def _asking(process: subprocess.Popen, errors: IO[str]) -> Planner:
    """What asks a process: a line of JSON there, and one back."""
    questions, answers = process.stdin, process.stdout
    assert questions and answers

    def ask(options: argparse.Namespace) -> Figures:
        try:
            questions.write(json.dumps(vars(options)) + "\n")
            questions.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            errors.seek(0)
            raise ChildProcessError(f"a process that plans has ended: {errors.read()[-2000:]}")
        return Figures(**json.loads(line))

    return ask


def main(program: str) -> None:
    """Plans a saved program for the options of each line, until there is none."""
    captures = Captures(saved(program))
    for line in sys.stdin:
        options = argparse.Namespace(**json.loads(line))
        sys.stdout.write(json.dumps(attrs.asdict(planned(captures, options))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
