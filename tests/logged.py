"""What examples with a framework's loop log, rank by rank."""

import json
import re
from pathlib import Path
from typing import Any

from processes import bounded

EXAMPLES = Path(__file__).parent.parent / "examples"
CLOCK = re.compile("runtime|per_second")  # what no two runs have alike


def logged(name: str, *arguments: object, ranks: int = 1) -> list[list[Any]]:
    """What each rank of an example says that it has logged, without times."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*(start if ranks > 1 else []), str(EXAMPLES / name), *map(str, arguments)]
    code, out, error = bounded(command, 400)
    assert code == 0, error
    found = dict(re.findall(r"rank (\d+) has logged (\[.*?\])(?=\s*(?:rank|$))", out))
    assert set(found) == {str(rank) for rank in range(ranks)}, out
    return [[_timeless(one) for one in json.loads(found[str(rank)])] for rank in range(ranks)]


def _timeless(one: Any) -> Any:
    kept = one.items() if isinstance(one, dict) else ()
    return {k: v for k, v in kept if not CLOCK.search(k)} if isinstance(one, dict) else one
