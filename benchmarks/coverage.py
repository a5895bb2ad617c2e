"""How many of other people's models are trained with eager's numbers, and why the rest is not.

    python benchmarks/coverage.py                        all models, an hour or two
    python benchmarks/coverage.py --only 'gpt2|unet'     those whose family/name has that in it
    python benchmarks/coverage.py --json out.json --resume       but for those in out.json
    python benchmarks/coverage.py --jobs 2 --markdown docs/coverage.md
    python benchmarks/coverage.py --sizes                four shapes: how many programs they take

Needs `pip install -e '.[coverage]'`. The models (`coverage_models/`) are tiny and have random
weights: nothing is downloaded. Each is examined in a process of its own (`coverage_case.py`) that
may take `--seconds`: three steps with other data and one with other shapes on 2 stages (1F1B),
three steps on 3 stages (ZB-H1), beside eager accumulation over the same microbatches, from the same
state each time. Compared are the loss, all gradients, buffers and parameters. A model is

    right     the largest difference is 0 (bitwise), or within rounding: 1e-4 of the value's size
    WRONG     numbers differ by more, and nobody said so
    refused   with an error that says why
    failed    with another error, a crash, or no end

Beside it: the door by which it was captured, into how many graphs Dynamo takes it, how even the
stages are (the slowest one's predicted seconds over their mean), and the seconds of the first call
and its backward beside those of `torch.compile(backend="aot_eager")` for one microbatch.

torchvision and torchaudio come for CUDA alone where PyPI is the only index: how they are imported
beside a torch for CPUs stands in `coverage_models/imports.py`.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import coverage_case
import coverage_models
import torch
from coverage_table import markdown, programs
from tqdm import tqdm

Row = dict[str, Any]


@attrs.frozen(eq=False)
class Child:
    """A process that examines a model, and when its time is over."""

    family: str
    name: str
    folder: Path
    end: float

    def row(self, status: int | None) -> Row:
        """What it has found out, and how it ended: None for not at all."""
        out, log = self.folder / "row.json", self.folder / "log"
        row = {"family": self.family, "name": self.name, "verdict": "failed", "phase": "start"}
        if out.exists():
            row |= json.loads(out.read_text())
        if status is None:
            row |= {"verdict": "failed", "cause": f"no end in time in {row['phase']}"}
        elif status:
            code = os.waitstatus_to_exitcode(status)
            last = log.read_text(errors="replace").strip().split("\n")[-1][:300]
            row |= {"verdict": "failed", "cause": f"the process ended with {code}: {last}"}
        return row


def begun(work: Callable[[], object], log: Path) -> int:
    """The id of a copy of this process that does some work and ends, with all that was imported.
    No autograd has run here, for its threads would not be in the copy."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.setsid()
        with log.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def every(
    todo: Sequence[tuple[str, str]],
    jobs: int,
    seconds: float,
    examine: Callable[[str, str, Path], object],
) -> Iterator[Row]:
    """The rows as they come, each from a process of its own that examines a model and writes what
    it finds to a path."""
    waiting, running = list(reversed(todo)), dict[int, Child]()
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                family, name = waiting.pop()
                child = Child(
                    family, name, Path(tempfile.mkdtemp(dir=folder)), time.monotonic() + seconds
                )
                work = partial(examine, family, name, child.folder / "row.json")
                running[begun(work, child.folder / "log")] = child
            time.sleep(0.05)
            for process, child in list(running.items()):
                ended, status = os.waitpid(process, os.WNOHANG)
                late = time.monotonic() > child.end
                if late and not ended:
                    os.killpg(process, signal.SIGKILL)
                    os.waitpid(process, 0)
                if ended or late:
                    del running[process]
                    yield child.row(status if ended else None)


def prepare(families: Sequence[str]) -> None:
    """Imports the families' packages, and what a first compilation imports."""
    for family in families:
        coverage_models.models(family)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "modules"
        process = begun(partial(_imported, out), Path(folder) / "log")
        os.waitpid(process, 0)
        for name in out.read_text().split() if out.exists() else ():
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _imported(out: Path) -> None:
    before = set(sys.modules)
    coverage_case.warm_up()
    out.write_text("\n".join(name for name in sys.modules if name not in before))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a regular expression for family/name")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300.0, help="that a model may take")
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--resume", action="store_true", help="keep the rows of that file")
    parser.add_argument("--markdown", type=Path, help="where the table goes, beside the terminal")
    parser.add_argument("--quick", action="store_true", help="two steps on 3 stages alone")
    parser.add_argument("--sizes", action="store_true", help="steps of four shapes alone")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # no threads beside this one, which forks
    wanted = [one for one in coverage_models.names() if re.search(asked.only, "/".join(one))]
    rows: dict[tuple[str, str], Row] = {}
    if asked.resume and asked.json and asked.json.exists():
        rows = {(r["family"], r["name"]): r for r in json.loads(asked.json.read_text())}
    todo = [one for one in wanted if one not in rows]
    prepare(list(dict.fromkeys(family for family, _ in todo)))
    shorter = coverage_case.SIZES if asked.sizes else coverage_case.QUICK
    ways = shorter if asked.sizes or asked.quick else coverage_case.WAYS
    found = every(todo, asked.jobs, asked.seconds, partial(coverage_case.main, ways=ways))
    for row in tqdm(found, total=len(todo), desc="models", disable=None):
        rows[row["family"], row["name"]] = row
        if asked.json:
            asked.json.write_text(json.dumps(list(rows.values()), indent=1))
        if row["verdict"] != "right":
            tqdm.write(f"{row['family']}/{row['name']}: {row['verdict']}: {row['cause'][:300]}")
        if asked.sizes and row["verdict"] == "right" and row["programs"] > 2:
            why = (row["by_size"] or ("by what was assumed of sizes",))[0]
            tqdm.write(f"{row['family']}/{row['name']}: {row['programs']} programs: {why[:300]}")
    if asked.sizes:
        print(programs([rows[one] for one in wanted]))
        sys.exit(any(row["verdict"] in ("WRONG", "unfit") for row in rows.values()))
    text = markdown([rows[one] for one in wanted])
    print(text)
    if asked.markdown:
        asked.markdown.write_text(text)
    sys.exit(any(row["verdict"] in ("WRONG", "unfit") for row in rows.values()))


if __name__ == "__main__":
    main()
