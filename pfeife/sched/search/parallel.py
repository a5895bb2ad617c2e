"""The same search with other seeds in processes of their own, which are asked and answer in JSON,
by files."""

import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs

from pfeife.data import plain, processes
from pfeife.data.schedule import Schedule
from pfeife.lowering.problem import Problem
from pfeife.sched.search.budget import Budget
from pfeife.sched.search.placements import Further, search_each
from pfeife.sched.search.run import SearchResult


@attrs.frozen
class _Task:
    """What a process searches. The clock is the machine's monotonic one."""

    problems: tuple[Problem, ...]
    seeds: tuple[tuple[Schedule, ...], ...]
    seed: int
    work: int
    deadline: float | None


@attrs.frozen
class _Answer:
    """Which problem has the best schedule, and what was found for it."""

    at: int
    result: SearchResult


def search_side_by_side(
    problems: Sequence[Problem],
    budget: Budget,
    seed: int,
    seeds: Sequence[Sequence[Schedule]],
    jobs: int,
    further: Further | None = None,
) -> tuple[int, SearchResult]:
    """The best of `jobs` searches with the seeds from `seed` on, each with the whole budget; of
    equals the one of the first seed. This process does the first one, and judges all by `further`
    where that is given."""
    others = [
        _Task(
            tuple(_finite(problem) for problem in problems),
            tuple(map(tuple, seeds)),
            seed + index,
            budget.left,
            None if math.isinf(budget.deadline) else budget.deadline,
        )
        for index in range(1, jobs)
    ]
    # This process searches while the others do, and asks for their answers when it is done.
    with _running(others) as answers:
        results = [search_each(problems, budget, seed, seeds, further), *answers()]

    def seconds(pair: tuple[int, SearchResult]) -> float:
        return further(pair[0], pair[1].schedule) if further else pair[1].seconds

    at, best = min(results, key=seconds)
    return at, attrs.evolve(
        best,
        evaluations=sum(result.evaluations for _, result in results),
        interrupted=any(result.interrupted for _, result in results),
    )


def _finite(problem: Problem) -> Problem:
    """JSON has no infinite numbers; no rank needs as many bytes as this either."""
    if problem.memory is None:
        return problem
    memory = tuple(min(limit, sys.float_info.max / 2) for limit in problem.memory)
    return attrs.evolve(problem, memory=memory)


@contextmanager
def _running(tasks: Sequence[_Task]) -> Iterator:
    """A process for every task, ended if they are no longer wanted; what waits for the answers."""
    with tempfile.TemporaryDirectory() as name:
        folder, started = Path(name), []
        for index, task in enumerate(tasks):
            task_path = folder / f"{index}.json"
            task_path.write_text(plain.to_json(task))
            paths = str(task_path), str(folder / f"{index}.out")
            streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE}
            started.append(processes.start(__name__, *paths, **streams))

        def answers() -> list[tuple[int, SearchResult]]:
            return [_answer(p, folder / f"{i}.out") for i, p in enumerate(started)]

        try:
            yield answers
        finally:
            processes.stop(started)


def _answer(process: subprocess.Popen, path: Path) -> tuple[int, SearchResult]:
    _, trouble = process.communicate()
    if process.returncode:
        raise RuntimeError(f"a process of the search ended: {trouble.decode(errors='replace')}")
    answer = plain.from_json(_Answer, path.read_text())
    return answer.at, answer.result


def main(task_path: str, answer_path: str) -> None:
    """Does what a file asks for, and writes the answer to another one."""
    task = plain.from_json(_Task, Path(task_path).read_text())
    deadline = math.inf if task.deadline is None else task.deadline
    at, result = search_each(task.problems, Budget(task.work, deadline), task.seed, task.seeds)
    Path(answer_path).write_text(plain.to_json(_Answer(at, result)))


if __name__ == "__main__":
    main(*sys.argv[1:])
