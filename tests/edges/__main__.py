"""Runs the rows of a topic on the ranks that torchrun starts: `-m edges TOPIC REPORT`.

Rank R writes REPORT/rankR.json, {row: "" or what went wrong there}.
"""

import faulthandler
import importlib
import json
import os
import sys
from pathlib import Path

import torch

from edges.table import verdict


def main(topic: str, report: Path) -> None:
    torch.set_num_threads(1)
    size, rank = int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
    found = {}
    for row in importlib.import_module(f"edges.{topic}").ROWS.values():
        if size in row.ranks:
            case = f"tests/test_edges.py::test_on_two_ranks[{topic}-{row.name}] (call)"
            os.environ["PYTEST_CURRENT_TEST"] = case  # as pytest does, for benchmarks/mutants.py
            faulthandler.dump_traceback_later(60, exit=True)  # a hang shows where
            found[row.name] = verdict(row)
            (report / f"rank{rank}.json").write_text(json.dumps(found))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
