"""What examples with a framework's loop log, rank by rank."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from processes import bounded

EXAMPLES = Path(__file__).parent.parent / "examples"
CLOCK = re.compile("runtime|per_second")  # what no two runs have alike


def logged(name: str, *arguments: object, ranks: int = 1) -> list[list[Any]]:
    """What each rank of an example says that it has logged, without times."""
    start = [] if ranks == 1 else ["-m", "forked", str(ranks)]
    command = [*start, str(EXAMPLES / name), *map(str, arguments)]
    code, out, error = bounded(command, 400, PYTHONPATH=os.pathsep.join(sys.path))
    assert code == 0, out + error
    found = dict(re.findall(r"rank (\d+) has logged (\[.*\])$", out, re.MULTILINE))
    assert set(found) == {str(rank) for rank in range(ranks)}, out
    return [[_timeless(one) for one in json.loads(found[str(rank)])] for rank in range(ranks)]


def _timeless(one: Any) -> Any:
    kept = one.items() if isinstance(one, dict) else ()
    return {k: v for k, v in kept if not CLOCK.search(k)} if isinstance(one, dict) else one
