"""Tests that run in one process or in several: a launch of processes for a package of them.

A module of the package has rows: `@row()` over a function that asserts what is right, or
`@row("first words of the error")` over one that must be refused; `ranks` says in how many
processes it runs, `whole` in which of these it does only if all tests run (see `share.py`).
`items` and `check` make a test of each.

    python -m rows REPORT 2 edges.state/lbfgs ...

runs rows on two ranks: rank R writes REPORT/rankR.json, {row: "" or what went wrong}.
"""

import faulthandler
import gc
import importlib
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import pytest
import torch
from forked import GRACE, Launch
from quick import leave_out

HERE = Path(__file__).parent
SECONDS = 100  # after which a row that hangs shows where
LONGEST = 3600 if os.environ.get("WHOLE") else 800  # seconds for all rows of a launch


@attrs.frozen
class Row:
    """One test; `refused` is how the error begins, "" where it must be right."""

    name: str
    run: Callable[[], None]
    refused: str = ""
    ranks: tuple[int, ...] = (1,)
    whole: tuple[int, ...] = ()


def row(refused: str = "", ranks: tuple[int, ...] = (1,), whole: tuple[int, ...] = ()) -> Callable:
    """Makes a row of a function; all rows of a module come in their order."""

    def note(run: Callable[[], None]) -> Callable[[], None]:
        add(run.__globals__, Row(run.__name__, run, refused, ranks, whole))
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

    @property
    def name(self) -> str:
        return f"{self.module}/{self.row.name}"

    @property
    def launch(self) -> tuple[str, int]:
        """What rows that run in one launch have in common."""
        return self.module.partition(".")[0], self.ranks


def items(
    package: str,
    topics: Sequence[str],
    *ranks: int,
    whole: Callable[[Item], bool] = lambda item: False,
) -> list:
    """A parameter for every row of a package's modules, for each number of processes; `whole` says
    which of them are not in the gate's share, beside those that say so themselves."""
    found = [
        Item(f"{package}.{topic}", count, one)
        for count in ranks
        for topic in topics
        for one in rows_of(f"{package}.{topic}").values()
        if count in one.ranks
    ]
    return [
        pytest.param(
            i,
            id=f"{i.module}-{i.ranks}-{i.row.name}",
            marks=[pytest.mark.whole] if i.ranks in i.row.whole or whole(i) else [],
        )
        for i in found
    ]


def rows_of(module: str) -> dict[str, Row]:
    """The rows of a module by their names."""
    found: dict[str, Row] = importlib.import_module(module).ROWS
    return found


def together(test: str) -> str:
    """The package and number of processes of a test on ranks, which share a launch; else the test
    itself."""
    found = re.search(r"\[(\w+)\.\w+-([2-9])-", test)
    return f"{found.group(1)} on {found.group(2)} ranks" if found else test


def check(item: Item, found_on_ranks: Callable[[Item], dict[str, str]]) -> None:
    """Fails unless every rank has run the row, and found nothing wrong."""
    found = found_on_ranks(item)
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
    ranks: int, report: Path, test: str, names: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Runs rows in `ranks` processes for a `test`; what each rank found, by row and rank."""
    command = [sys.executable, "-m", "rows", str(report), str(ranks), *names]
    path = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LONGEST + 100,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "ROWS_OF": test},
    )
    found: dict[str, dict[str, str]] = {}
    for rank in range(ranks):
        said = report / f"rank{rank}.json"
        for name, what in (json.loads(said.read_text()) if said.exists() else {}).items():
            found.setdefault(name, {})[f"rank {rank}"] = what
    if run.returncode:
        found["the processes"] = {"all": run.stdout[-6000:] + run.stderr[-2000:]}
    return found


def on_this_rank(report: Path, names: Sequence[str]) -> None:
    """Runs rows on one rank."""
    size, rank = int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
    found = {}
    for name in names:
        module, _, label = name.partition("/")
        case = f"[{module}-{size}-{label}] (call)"  # as pytest does, for benchmarks/mutants.py
        os.environ["PYTEST_CURRENT_TEST"] = os.environ.get("ROWS_OF", "") + case
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        found[name] = verdict(rows_of(module)[label])
        (report / f"rank{rank}.json").write_text(json.dumps(found))
    faulthandler.cancel_dump_traceback_later()


def main(report: Path, ranks: int, *names: str) -> int:
    """Runs rows on so many ranks. Where one ends badly the others are ended too, as torchrun does
    it; returns 1 then."""
    leave_out()
    importlib.import_module("pfeife.testing")  # rows' modules want to know their rank
    gc.freeze()
    launch = Launch(ranks, lambda rank, _: on_this_rank(report, names), seconds=LONGEST)
    bad = launch.wait(GRACE)
    print(launch.close(), *(f"rank {rank} ended with {code}" for rank, code in bad.items()))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
