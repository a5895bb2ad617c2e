"""What people write in training loops, beside plain torch on one device: a table.

    python benchmarks/loop_table.py                               all of it (an hour)
    python benchmarks/loop_table.py --ranks 2 --only a_closure    a part of it
    python benchmarks/loop_table.py --ranks 1 --kept part.json    its parts, one after another
    python benchmarks/loop_table.py --markdown docs/loops.md

The scripts are those of tests/scripts.py. Each runs 20 steps on 1, 2 and 4 ranks, by three families
of schedules, with one pipeline and with two; losses, gradients, parameters, buffers, optimizer
state and what the script prints are compared at each step. Exits non-zero if anything is wrong.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests")]

from beside import Cell, Verdict, judged, summed  # noqa: E402
from scripts import LIMIT, SCRIPTS  # noqa: E402

import pfeife  # noqa: E402

SCHEDULES = ("gpipe", "1f1b", "interleaved")
HANGS = 150  # seconds after which a script that hangs shows where
Found = dict[tuple[str, Cell], Verdict]


def on_this_rank(names: Sequence[str], cells: Sequence[Cell], report: Path) -> None:
    """Writes a line of JSON for each script in each cell."""
    torch.set_num_threads(1)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")
    with (report / f"{rank}.json").open("w") as out:
        for name in names:
            for cell in cells:
                faulthandler.dump_traceback_later(HANGS, exit=True)
                torch._dynamo.reset()
                found = _judged(name, cell, rank)
                line = [name, attrs.asdict(cell), attrs.asdict(found)]
                print(json.dumps(line), file=out, flush=True)
                failed = torch.tensor(float(found.kind != "right"))
                if size > 1:
                    dist.all_reduce(failed)
                if size > 1 and failed:
                    _connect_anew()
    faulthandler.cancel_dump_traceback_later()


def _connect_anew() -> None:
    """A call of all ranks, for the next script: the first one of a rank that has only heard of a
    failure raises that."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    stages = int(os.environ["WORLD_SIZE"])
    step = pfeife.compile(
        lambda x: net(x).sum(), microbatches=stages, replicas=stages, timeout=30.0, progress=False
    )
    with contextlib.suppress(pfeife.PipelineError):
        step(torch.ones(stages, 2))
        return
    step(torch.ones(stages, 2))


def _judged(name: str, cell: Cell, rank: int) -> Verdict:
    try:
        return judged(SCRIPTS[name], cell, rank)
    except Exception as error:
        return Verdict("WRONG", text=f"{type(error).__name__}: {error}")


def outcomes(names: Sequence[str], cells: Sequence[Cell]) -> Found:
    """What becomes of scripts in cells of one number of ranks; where processes end, others go on
    with the next script."""
    ranks, left = cells[0].ranks, list(names)
    found: Found = {}
    while left:
        told, error = launched(left, cells)
        over = [name for name in left if all(len(told.get((name, c), ())) == ranks for c in cells)]
        found |= {(name, cell): summed(told[name, cell]) for name in over for cell in cells}
        left = left[len(over) :]
        for cell in cells if left else ():
            mine = told.get((left[0], cell), ())
            ended = Verdict("WRONG", text=f"the processes ended: {error}")
            found[left[0], cell] = summed(mine) if len(mine) == ranks else ended
        left = left[1:]
    return found


def launched(
    names: Sequence[str], cells: Sequence[Cell]
) -> tuple[dict[tuple[str, Cell], list[Verdict]], str]:
    """What each rank has reported, and where it was when it ended."""
    ranks = cells[0].ranks
    command = [str(Path(__file__).resolve())]
    if ranks > 1:
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*run, *command]
    command += ["--cells", json.dumps([attrs.asdict(cell) for cell in cells])]
    command += [word for name in names for word in ("--only", name)]
    found: dict[tuple[str, Cell], list[Verdict]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{HERE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        ended = subprocess.run(
            [sys.executable, *command, "--report", folder],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        for file in Path(folder).iterdir():
            for line in file.read_text().splitlines():
                name, cell, said = json.loads(line)
                found.setdefault((name, Cell(**cell)), []).append(_verdict(said))
    return found, ended.stderr[:2500] if ended.returncode else ""


def _verdict(said: dict[str, Any]) -> Verdict:
    lists = {key: tuple(said[key]) for key in ("gradients", "wanted")}
    return Verdict(**{**said, **lists})


def _before(kept: Path) -> Found:
    lines = json.loads(kept.read_text()) if kept.exists() else []
    return {(name, Cell(**cell)): _verdict(said) for name, cell, said in lines}


def word(verdict: Verdict) -> str:
    """A cell of the table."""
    if verdict.kind == "right":
        return f"{verdict.error:.0e}" if verdict.error else "bitwise"
    return verdict.kind


def table(found: Found) -> list[list[str]]:
    """A row a script, a column for each number of ranks and pipelines; the word of the worst
    schedule."""
    order = ("WRONG", "refused", "right")
    columns = sorted({(cell.ranks, cell.replicas) for _, cell in found})
    lines = [["script", *(f"{ranks} ranks, DP {copies}" for ranks, copies in columns)]]
    for name in dict.fromkeys(name for name, _ in found):
        line = [name.replace("_", " ")]
        for column in columns:
            mine = [v for (n, c), v in found.items() if n == name and _column(c) == column]
            worst = min(mine, key=lambda one: (order.index(one.kind), -one.error), default=None)
            line.append(word(worst) if worst else "")
        lines.append(line)
    return lines


def _column(cell: Cell) -> tuple[int, int]:
    return cell.ranks, cell.replicas


def sentences(found: Found) -> list[list[str]]:
    """How scripts were refused, each once."""
    said: dict[tuple[str, str], str] = {}
    for (name, _), verdict in found.items():
        if verdict.kind == "refused":
            said.setdefault((name, verdict.kind), verdict.text)
    return [[name.replace("_", " "), kind, text] for (name, kind), text in said.items()]


def markdown(found: Found) -> str:
    counts = Counter(verdict.kind for verdict in found.values())
    schedules = ", ".join(dict.fromkeys(cell.schedule for _, cell in found))
    text = f"""\
        # What people write in training loops

        By `python benchmarks/loop_table.py`, with torch {torch.__version__}: the scripts of
        `tests/scripts.py`, 20 steps each, by {schedules} (a cell has the worst of them), beside
        plain torch on one device that accumulates gradients over the same microbatches. Losses,
        gradients, parameters, buffers, optimizer state and what a script prints are compared.

        `bitwise`: all bits are the same. A number: two sums are re-associated there (replicas, a
        weight that several stages have), and that is the largest difference, in units of the
        largest value of its tensor, in float64 (wrong beyond {LIMIT:.0e}). `refused`: it ends with
        the sentence below. On "1 ranks" two stages run in one process.

        Parts may be of other days (`--kept`), and then of other code.

        **{len(found)} cells: {counts["right"]} right, {counts["refused"]} refused,
        {counts["WRONG"]} WRONG.**
        """
    parts = [textwrap.dedent(text), _lines(table(found)), "## Words"]
    return "\n".join([*parts, "", _lines([["script", "", "text"], *sentences(found)])])


def _lines(rows: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    cells.insert(1, ["---"] * len(rows[0]))
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--replicas", default="1,2")
    parser.add_argument("--kept", type=Path, help="a file with what was found before, and now")
    parser.add_argument("--only", action="append", help="the name of a script")
    parser.add_argument("--markdown", type=Path, help="a file for the table")
    parser.add_argument("--cells", help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.only or list(SCRIPTS)
    if args.report:
        on_this_rank(names, [Cell(**one) for one in json.loads(args.cells)], args.report)
        return
    found = _before(args.kept) if args.kept else {}
    numbers = [int(one) for one in args.ranks.split(",")]
    for ranks, replicas in product(numbers, map(int, args.replicas.split(","))):
        found |= outcomes(names, [Cell(ranks, s, replicas) for s in args.schedules.split(",")])
        print(f"{ranks} ranks, DP {replicas}", file=sys.stderr)
        if args.kept:
            lines = [[n, attrs.asdict(c), attrs.asdict(v)] for (n, c), v in found.items()]
            args.kept.write_text(json.dumps(lines))
    for (name, cell), verdict in found.items():
        if verdict.kind == "WRONG":
            print(f"WRONG: {name}, {cell}: {verdict.text}")
    print(markdown(found))
    if args.markdown:
        args.markdown.write_text(markdown(found))
    sys.exit(any(verdict.kind == "WRONG" for verdict in found.values()))


if __name__ == "__main__":
    main()
