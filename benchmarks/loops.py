"""Generated training loops: each is equal to plain eager accumulation, or an error says why not.

    python benchmarks/loops.py                           2,000 loops, half of them on two ranks
    python benchmarks/loops.py --count 50 --ranks 2      some of them
    python benchmarks/loops.py --only 17 --ranks 2       one of them again
    python benchmarks/loops.py --shrink                  with the least loop for each difference

A loop is a random net, options, and a sequence of what scripts do (`loop_cases.py`); how it is
judged stands in `loop_ranks.py`. Prints a table by action, the errors that ended loops, every
difference, and the slowest loop. Exits non-zero if a loop was silently wrong, ended with an
error that is not documented, or took longer than its limit.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import attrs
import torch.distributed as dist
from loop_cases import Loop, drawn, names, smaller
from loop_ranks import LEFT

from pfeife import report

HERE = Path(__file__).parent
AT_ONCE = 100  # loops that processes run before they tell what they have found
START = 60  # seconds that processes may take to start
FINE = ("right", "stopped")
WORST = ("hang", "silent", "undocumented", "stopped", "right")


@attrs.frozen
class Outcome:
    """A loop that is over, by what the worst rank says."""

    loop: Loop
    ranks: int
    kind: str
    word: str = ""
    text: str = ""
    at: str = ""
    seconds: float = 0.0


def outcomes(loops: Sequence[Loop], ranks: int, limit: int) -> Iterator[Outcome]:
    """What becomes of the loops; processes that end before all are done are started again."""
    left = list(loops)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            reports, codes = _run(left[:AT_ONCE], ranks, limit, Path(folder))
            traces = "".join(_tail(Path(folder) / f"{rank}.trace") for rank in range(ranks))
        done = max(len(lines) for lines in reports)
        if set(codes) <= {0, LEFT} and done:
            over = done
        else:  # a process was ended within the loop that no rank, or not each, has reported
            traces += f"\nexit codes {codes}"
            over = min(len(lines) for lines in reports) + 1
        for at, loop in enumerate(left[:over]):
            yield _judged(loop, ranks, [lines[at] for lines in reports if at < len(lines)], traces)
        left = left[over:]


def _run(
    loops: Sequence[Loop], ranks: int, limit: int, folder: Path
) -> tuple[list[list[dict]], list[int | None]]:
    """The reports of every rank, as far as they came, and the exit codes of its process."""
    (folder / "loops.json").write_text(json.dumps([attrs.asdict(loop) for loop in loops]))
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(ranks):
        command = [sys.executable, str(HERE / "loop_ranks.py"), str(folder / "loops.json")]
        command += [str(folder / f"{rank}.report"), str(limit)]
        command += [str(store.port)] if ranks > 1 else []
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        path = f"{HERE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        log = (folder / f"{rank}.log").open("w")
        started.append(
            subprocess.Popen(
                command, env={**os.environ, **place, "PYTHONPATH": path}, stdout=log, stderr=log
            )
        )
    files = [folder / f"{rank}.report" for rank in range(ranks)]
    _wait(started, files, START + limit)
    for rank in range(ranks):
        if not files[rank].exists():
            print((folder / f"{rank}.log").read_text()[-1500:], file=sys.stderr)
    found = [file.read_text().splitlines() if file.exists() else [] for file in files]
    lines = [[json.loads(line) for line in texts] for texts in found]
    return lines, [process.returncode for process in started]


def _wait(started: Sequence[subprocess.Popen], files: Sequence[Path], limit: int) -> None:
    """Until all have ended, or nothing has been reported for longer than a loop may take."""
    size, since = -1, time.monotonic()
    while any(process.poll() is None for process in started):
        time.sleep(0.05)
        now = sum(file.stat().st_size for file in files if file.exists())
        if now != size:
            size, since = now, time.monotonic()
        if time.monotonic() - since > limit:
            for process in started:
                process.kill()
    for process in started:
        process.wait()


def _tail(trace: Path) -> str:
    return trace.read_text()[-1500:] if trace.exists() else ""


def _judged(loop: Loop, ranks: int, lines: Sequence[dict], traces: str) -> Outcome:
    """What the worst rank says; nothing at all is a hang."""
    if len(lines) < ranks:
        missing = Outcome(loop, ranks, "hang", text=traces)
        silent = [line for line in lines if line["kind"] == "silent"]
        return _of(loop, ranks, silent[0]) if silent else missing
    worst = min(lines, key=lambda line: WORST.index(line["kind"]))
    found = attrs.evolve(_of(loop, ranks, worst), seconds=max(one["seconds"] for one in lines))
    return attrs.evolve(found, **_untrained(lines)) if found.kind == "right" else found


def _of(loop: Loop, ranks: int, line: dict) -> Outcome:
    words = {name: line[name] for name in ("kind", "word", "text", "at", "seconds")}
    return Outcome(loop, ranks, **words)


def _untrained(lines: Sequence[dict]) -> dict[str, str]:
    """A parameter that eager trains and no rank has."""
    cut = [line["parts"].index("/") for line in lines]
    wanted = {n for line, at in zip(lines, cut, strict=True) for n in line["parts"][:at]}
    found = {n for line, at in zip(lines, cut, strict=True) for n in line["parts"][at + 1 :]}
    lost = sorted(wanted - found)
    return {"kind": "silent", "text": f"nobody trains {lost}", "at": "the end"} if lost else {}


def least(outcome: Outcome, limit: int) -> Loop:
    """The loop made smaller as long as the same becomes of it."""
    loop, found = outcome.loop, True
    while found:
        found = False
        for one in outcomes(list(smaller(loop)), outcome.ranks, limit):
            if (one.kind, one.word) == (outcome.kind, outcome.word):
                loop, found = one.loop, True
                break
    return loop


def tell(one: Outcome) -> None:
    print(f"{one.kind}, {one.ranks} ranks, loop {one.loop.index}, at {one.at}: {one.text}")
    print(f"    {one.loop}", flush=True)


def show(found: Sequence[Outcome]) -> None:
    """Prints what became of the loops."""
    kinds = ("right", "stopped", "silent", "undocumented", "hang")
    rows = []
    for name in [*names([one.loop for one in found]), "all"]:
        mine = [one for one in found if name == "all" or name in names([one.loop])]
        count = Counter(one.kind for one in mine)
        rows.append((name, len(mine), *(count[kind] for kind in kinds)))
    print("\n" + report.table(rows, ("loops with", "loops", *kinds)), "\n")
    words = Counter(
        (one.ranks, one.word, re.sub(r"[\d.]+", "N", one.text[:90]).replace("\n", " "))
        for one in found
        if one.kind == "stopped"
    )
    rows = [(*key, n) for key, n in words.most_common()]
    print(report.table(rows, ("ranks", "ended by", "with", "loops")))
    slow = max(found, key=lambda one: one.seconds)
    print(f"\nslowest: {slow.seconds:.1f} s, loop {slow.loop.index} on {slow.ranks} ranks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--ranks", default="1,2", help="in how many processes, such as 1,2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, action="append", help="the number of a loop")
    parser.add_argument("--without", action="append", default=[], help="an action to leave out")
    parser.add_argument("--limit", type=int, default=30, help="seconds that a loop may take")
    parser.add_argument("--shrink", action="store_true", help="make wrong loops small")
    args = parser.parse_args()
    sizes = [int(one) for one in args.ranks.split(",")]
    found: list[Outcome] = []
    for ranks in sizes:
        numbers = args.only or range(args.count // len(sizes))
        loops = [drawn(args.seed, index, ranks) for index in numbers]
        loops = [one for one in loops if not set(args.without) & set(names([one]))]
        for one in outcomes(loops, ranks, args.limit):
            found.append(one)
            if one.kind not in FINE:
                tell(one)
                if args.shrink:
                    print(f"    least: {least(one, args.limit)}", flush=True)
    show(found)
    wrong = sum(one.kind not in FINE for one in found)
    print(f"{len(found)} loops, {wrong} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
