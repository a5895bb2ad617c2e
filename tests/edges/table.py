"""What became of a row, and how a topic's rows run on ranks."""

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import torch

from edges import TOPICS, Edge

HERE = Path(__file__).parent


def rows(ranks: int) -> list[tuple[str, Edge]]:
    """The rows that run in so many processes, with their topics."""
    modules = ((topic, importlib.import_module(f"edges.{topic}")) for topic in TOPICS)
    return [(t, row) for t, module in modules for row in module.ROWS.values() if ranks in row.ranks]


def verdict(row: Edge) -> str:
    """Runs a row in this process: "" if it ended as it must, else what went wrong."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        row.run()
    except Exception as error:
        said = str(error)
        refused = row.refused and not isinstance(error, AssertionError)
        if refused and said.startswith(row.refused):
            return ""
        return "".join(traceback.format_exception(error))[-3000:]
    return f"was not refused with {row.refused!r}" if row.refused else ""


def on_ranks(topic: str, ranks: int, report: Path) -> dict[str, dict[str, str]]:
    """Runs a topic's rows in `ranks` processes; what each rank found, by row and rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "edges", topic, str(report)]
    path = f"{HERE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    found: dict[str, dict[str, str]] = {}
    for rank in range(ranks):
        said = report / f"rank{rank}.json"
        for name, what in (json.loads(said.read_text()) if said.exists() else {}).items():
            found.setdefault(name, {})[f"rank {rank}"] = what
    if run.returncode:
        found["the processes"] = {"all": run.stdout[-2000:] + run.stderr[-6000:]}
    return found
