"""Tests that run in one process or in several: a launch of processes for a module of them.

A module has rows: `@row()` over a function that asserts what is right, or
`@row("first words of the error")` over one that must be refused; `ranks` says in how many
processes it runs. `items` and `check` make a test of each.

    python -m torch.distributed.run --nproc-per-node 2 -m rows edges.state REPORT [ROW ...]

runs those of a module on ranks, or some of them: rank R writes REPORT/rankR.json, {row: "" or
what went wrong}.
"""

import faulthandler
import importlib
import json
import logging
import os
import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest
import torch

HERE = Path(__file__).parent
SECONDS = 100  # after which a row that hangs shows where


@attrs.frozen
class Row:
    """One test; `refused` is how the error begins, "" where it must be right."""

    name: str
    run: Callable[[], None]
    refused: str = ""
    ranks: tuple[int, ...] = (1,)


def row(refused: str = "", ranks: tuple[int, ...] = (1,)) -> Callable:
    """Makes a row of a function; all rows of a module come in their order."""

    def note(run: Callable[[], None]) -> Callable[[], None]:
        add(run.__globals__, Row(run.__name__, run, refused, ranks))
        return run

    return note


def add(module: dict, one: Row) -> None:
    """Adds a row to a module, by its globals."""
    module.setdefault("ROWS", {})[one.name] = one


@attrs.frozen
class Item:
    """A row in a number of processes."""

    module: str
    ranks: int
    row: Row


def rows(module: str, ranks: int) -> list[Row]:
    """Those of a module that run in so many processes."""
    found = importlib.import_module(module).ROWS.values()
    return [one for one in found if ranks in one.ranks]


def items(package: str, topics: Sequence[str], *ranks: int) -> list:
    """A parameter for every row of a package's modules, for each number of processes."""
    found = [
        Item(f"{package}.{topic}", count, one)
        for count in ranks
        for topic in topics
        for one in rows(f"{package}.{topic}", count)
    ]
    return [pytest.param(i, id=f"{i.module}-{i.ranks}-{i.row.name}") for i in found]


def together(test: str) -> str:
    """The module and number of processes of a test on ranks, which share a launch; else the test
    itself."""
    found = re.search(r"\[(\w+\.\w+-([2-9]))-", test)
    return found.group(1) if found else test


def check(item: Item, found_on_ranks: Callable[[str, int, str], dict[str, str]]) -> None:
    """Fails unless every rank has run the row, and found nothing wrong."""
    found = found_on_ranks(item.module, item.ranks, item.row.name)
    assert len(found) == item.ranks and not any(found.values()), found


def verdict(one: Row) -> str:
    """Runs a row in this process: "" if it ended as it must, else what went wrong."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        one.run()
    except Exception as error:
        refused = one.refused and not isinstance(error, AssertionError)
        if refused and str(error).startswith(one.refused):
            return ""
        return "".join(traceback.format_exception(error))[-3000:]
    return f"was not refused with {one.refused!r}" if one.refused else ""


def on_ranks(
    module: str, ranks: int, report: Path, test: str, names: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Runs rows of a module in `ranks` processes for a `test`; what each rank found, by row and
    rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "rows", module, str(report), *names]
    path = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "ROWS_OF": test},
    )
    found: dict[str, dict[str, str]] = {}
    for rank in range(ranks):
        said = report / f"rank{rank}.json"
        for name, what in (json.loads(said.read_text()) if said.exists() else {}).items():
            found.setdefault(name, {})[f"rank {rank}"] = what
    if run.returncode:
        found["the processes"] = {"all": run.stdout[-2000:] + run.stderr[-6000:]}
    return found


@contextmanager
def said() -> Iterator[list[str]]:
    """What is logged or warned meanwhile; logged only on rank 0."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    log = logging.getLogger("pfeife")
    log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield found
        found += [str(one.message) for one in warned if "microbatches count" in str(one.message)]
    finally:
        log.removeHandler(handler)


def main(module: str, report: Path, *names: str) -> None:
    torch.set_num_threads(1)
    size, rank = int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
    found = {}
    for one in rows(module, size):
        if names and one.name not in names:
            continue
        case = f"[{module}-{size}-{one.name}] (call)"  # as pytest does, for benchmarks/mutants.py
        os.environ["PYTEST_CURRENT_TEST"] = os.environ.get("ROWS_OF", "") + case
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        found[one.name] = verdict(one)
        (report / f"rank{rank}.json").write_text(json.dumps(found))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
