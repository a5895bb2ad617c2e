"""One command for the day there is a GPU: what is right, what is wrong, how fast it is.

    python benchmarks/gpu.py --minutes 9 --json gpu.json     # on a machine with a GPU
    python benchmarks/gpu.py --device cpu                    # the rows themselves, small, with Gloo

It needs torch 2.11 or newer, the dependencies of the package, and no network; the package need not
be installed. Rows are tried in processes of their own, each with a limit: a crash or a hang loses
one. Every row is printed as it ends, the most telling ones come first, and the JSON file is whole
after each. Rows are "right", "wrong", "error", "timeout" or "skipped" with a reason; the last thing
printed is a table in markdown. The exit code is 0 if all are right or skipped, 1 if not, 2 where
there is nothing to try on; then one sentence says what is missing.

Where a command may take ten minutes at most: `--minutes 9`; `--parts correctness,nccl` and `--only
words` choose rows, `--list` names them. Correctness is bitwise against eager accumulation on the
same device, with deterministic algorithms; what may round says why.
"""

import argparse
import functools
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from gpu.surroundings import devices, missing, versions  # noqa: E402

LISTING = 180.0  # seconds in which a worker imports a part
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # or its results are not those of the run before
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    "PYTHONUNBUFFERED": "1",
}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", default="", help="with commas between them; all unless given")
    parser.add_argument("--only", default="", help="words that a row's name must have")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which nothing is begun")
    parser.add_argument("--small", action="store_true", help="sizes of a CPU on a GPU too")
    parser.add_argument("--jobs", type=int, help="rows side by side, where nothing is timed")
    parser.add_argument("--json", type=Path, help="where the verdicts go")
    parser.add_argument("--list", action="store_true", help="names the rows, and tries none")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def refuse(why: str, file: Path | None) -> int:
    print(f"benchmarks/gpu.py: {why}")
    if file:
        write(file, {"refused": why, "rows": []})
    return 2


def write(file: Path, content: object) -> None:
    """Atomically: who reads it while rows run finds all that were tried."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
        json.dump(content, new, indent=1)
    os.replace(new.name, file)


def main() -> int:
    begun, arguments = time.monotonic(), parsed()
    why = missing(arguments.device)
    if why:
        return refuse(why, arguments.json)
    from gpu import rows, workers

    parts = arguments.parts.split(",") if arguments.parts else rows.PARTS
    unknown = [part for part in parts if part not in rows.PARTS]
    if unknown:
        return refuse(f"there is no part {unknown[0]!r}; there are {', '.join(rows.PARTS)}", None)
    small = arguments.small or arguments.device == "cpu"
    setting = rows.Setting(devices(arguments.device), small)
    if arguments.serve:
        workers.serve(lambda name: workers.run_row(name, setting))
        return 0
    log = Log(versions(), arguments.json)
    command = [sys.executable, str(HERE / "gpu.py"), "--serve", "--device", arguments.device]
    command += ["--small"] if arguments.small else []
    make = functools.partial(workers.Worker, command, ENVIRONMENT)
    together = workers.Together(make, begun + 60 * arguments.minutes, log.tell)
    cores = len(os.sched_getaffinity(0))
    jobs = max(1, arguments.jobs or (min(6, cores // 2) if setting.cuda else 1))
    for part, first, known in opened(parts, make, cores > 4):
        if known.verdict != "right":
            log.tell(known)
        words = arguments.only.split()
        chosen = {n: s for n, s in known.figures.items() if all(word in n for word in words)}
        if arguments.list:
            print("\n".join(chosen), flush=True)
        else:
            together(chosen, first, 1 if part in rows.TIMED else jobs)
        first.end()
    if not arguments.list:
        print(f"\n{table(log.told)}\n\n{counted(log.told)} in {time.monotonic() - begun:.0f} s")
    return 0 if all(one.verdict in rows.GOOD for one in log.told) else 1


def opened(
    parts: Sequence[str], make: Callable[[], Any], ahead: bool
) -> Iterator[tuple[str, Any, Any]]:
    """Each part with its first worker, and what that says of the part's rows. `ahead`, for where
    there are cores for it, a worker imports while the part before runs."""

    def ready(part: str) -> tuple[Any, Any]:
        worker = make()
        return worker, worker.ask(f"?{part}", LISTING)

    with ThreadPoolExecutor(1) as thread:
        upcoming = thread.submit(ready, parts[0])
        for part, following in itertools.zip_longest(parts, parts[1:]):
            first, known = upcoming.result()
            if following and ahead:
                upcoming = thread.submit(ready, following)
            yield part, first, known
            if following and not ahead:
                upcoming = thread.submit(ready, following)


class Log:
    """What is said of rows: printed as it comes, and in the file after each."""

    def __init__(self, about: dict[str, Any], file: Path | None):
        self.about, self.file = about, file
        self.told: list[Any] = []
        self.lock = threading.Lock()
        print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)

    def tell(self, verdict: Any) -> None:
        with self.lock:
            self.told.append(verdict)
            print(verdict, flush=True)
            if self.file:
                rows = [vars_of(one) for one in self.told]
                write(self.file, {"machine": self.about, "rows": rows})


def vars_of(verdict: Any) -> dict[str, Any]:
    import attrs  # not before it is known to be there

    return attrs.asdict(verdict)


def table(told: Sequence) -> str:
    """In markdown; what is not right comes first."""
    from gpu.rows import GOOD, shown

    def line(one) -> str:
        figures = ", ".join(f"{name} {shown(value)}" for name, value in one.figures.items())
        cells = (
            one.name,
            one.verdict,
            f"{one.seconds:.1f}",
            "; ".join(filter(None, (one.why, figures))),
        )
        return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"

    tried = [one for one in told if one.verdict != "skipped"]
    ordered = sorted(tried, key=lambda one: one.verdict in GOOD)
    reasons: dict[str, list[str]] = {}
    for one in told:
        if one.verdict == "skipped":
            reasons.setdefault(one.why, []).append(one.name)
    skipped = [f"- skipped, {why}: {', '.join(names)}" for why, names in reasons.items()]
    head = ["| row | verdict | s | figures |", "|---|---|---|---|"]
    return "\n".join([*head, *map(line, ordered), *([""] if skipped else []), *skipped])


def counted(told: Sequence) -> str:
    words = [one.verdict for one in told]
    return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words)) or "no rows"


if __name__ == "__main__":
    sys.exit(main())
