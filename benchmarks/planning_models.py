"""How long planning takes for models that are trained on clusters, in how much memory, and what is
predicted for them, beside what others have published.

    python benchmarks/planning_models.py [--only NAME] [--json FILE]

Each row is the command line (`pfeife plan config.json ...`) in a process of its own, with an empty
cache and then with the capture that the first one kept. The configurations are those of the models'
cards, written out here; nothing is downloaded. What is published was run in other ways (tensor
parallelism, FSDP, LoRA), which the notes say.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import attrs
from planning_cases import CASES, MEMBERS, MIXTURES, Case

from pfeife import report
from pfeife.data import plain
from pfeife.data.forecast import Forecast


@attrs.frozen
class Asked:
    """One process: its seconds (those of the CPU tell more where others work too), the most memory
    that it had, and what it said."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    forecast: Forecast | None
    said: str


def ask(case: Case, folder: Path) -> Asked:
    """One `pfeife plan`, with the captures of a folder."""
    config, out = folder / "config.json", folder / "forecast.json"
    config.write_text(json.dumps(case.config))
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pfeife", "plan", str(config), *case.options.split()]
    command += ["--cache", str(folder / "cache"), "--json", str(out)]
    start = time.perf_counter()
    with open(folder / "said.txt", "w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        _, _, used = os.wait4(process.pid, 0)  # of this child alone
        seconds = time.perf_counter() - start
        said.seek(0)
        text = said.read()
    found = plain.load(Forecast, out) if out.exists() else None
    return Asked(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, found, text)


def row(case: Case, cold: Asked, again: Asked) -> tuple:
    times = tuple(f"{one.seconds:.0f} s ({one.cpu_seconds:.0f} s)" for one in (cold, again))
    memory = report.size(max(cold.peak_bytes, again.peak_bytes))
    found = cold.forecast
    if found is None:
        return (case.name, *times, memory, cold.said.strip().splitlines()[-1], "", "", "", "")
    rate = found.tokens_per_second or found.samples_per_second
    each = f"{rate / found.world:.4g} {'tokens' if found.tokens else 'samples'}/s"
    figures = (f"{found.step_seconds:.3g} s", each, f"{found.utilization:.1%}")
    return (case.name, *times, memory, *figures, report.size(found.peak_bytes), case.published)


HEAD = ("model", "cold (CPU)", "cached (CPU)", "planning's peak", "step", "a rank", "MFU")
HEAD = (*HEAD, "peak a rank", "published")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="the cases whose names have this in them")
    parser.add_argument("--json", help="where to write all forecasts")
    given = parser.parse_args()
    rows, kept = [], {}
    for case in (*CASES, *MEMBERS, *MIXTURES):
        if given.only and given.only.lower() not in case.name.lower():
            continue
        with tempfile.TemporaryDirectory() as folder:
            cold = ask(case, Path(folder))
            again = ask(case, Path(folder))
        rows.append(row(case, cold, again))
        kept[case.name] = json.loads(plain.to_json(cold.forecast)) if cold.forecast else cold.said
        print(f"{case.name}: {cold.seconds:.0f} s, {again.seconds:.0f} s", file=sys.stderr)
    print("| " + " | ".join(HEAD) + " |")
    print("|" + "---|" * len(HEAD))
    for one in rows:
        print("| " + " | ".join(map(str, one)) + " |")
    for case in (*CASES, *MEMBERS, *MIXTURES):
        if case.source:
            print(f"\n{case.name}: {case.source}")
    if given.json:
        Path(given.json).write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
