"""Files that pfeife and torch write: what each is, and what is in it."""

import json
from pathlib import Path
from typing import Any

from pfeife.data import files, plain
from pfeife.data.forecast import Forecast
from pfeife.data.machine import Machine
from pfeife.data.network import Network
from pfeife.data.plan import Costs, Plan
from pfeife.data.schedule import Schedule
from pfeife.data.timeline import Timeline
from pfeife.frontend.cache.program_json import StoredProgram

# By which fields a file is known. The first that fits counts: a forecast has `ranks` too, and so
# schedules come last.
_FIELDS: dict[type, set[str]] = {
    Plan: {"stage_of_cluster", "schedule"},
    Forecast: {"by_rank", "waits"},
    Machine: {"memory_bandwidth", "link_bandwidth"},
    Timeline: {"events"},
    Costs: {"source", "seconds"},
    StoredProgram: {"nodes", "texts", "inputs"},
    Schedule: {"ranks"},
}


def read(path: str) -> Any:
    """What a file has: one of these classes, or "trace" with its events, or a dictionary of JSON
    that is none of them. Raises ValueError for what cannot be read."""
    # A schedule's CSV is the only one that is no JSON.
    text = _text(path)
    if not text.lstrip().startswith(("{", "[")):
        try:
            return schedule_of(path)
        except ValueError as error:
            if Path(path).suffix == ".csv":
                raise
            raise ValueError(
                f"{path}: no file that pfeife or torch has written; it is neither JSON nor the "
                f"CSV of a schedule ({str(error).removeprefix(f'{path}: ')})"
            ) from None
    data = json_of(path)
    fields = set(data) if isinstance(data, dict) else set()
    for kind, needed in _FIELDS.items():
        if needed <= fields:
            return plain.load(kind, path)
    # All fields of a network have defaults, so a file may have any of them, but no others.
    if fields & {"links", "nodes"} and fields <= {"links", "nodes", "across", "sha256"}:
        return plain.load(Network, path)
    return data


def json_of(path: str) -> Any:
    """What a file of JSON has. Raises ValueError for another file."""
    text = _text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: this is not JSON: {error}") from None


def schedule_of(path: str) -> Schedule:
    """The schedule of a CSV, ours or torch's. Raises ValueError for another file."""
    text = _text(path)
    try:
        return Schedule.from_csv(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _text(path: str) -> str:
    try:
        return files.read_text(Path(path), plain.LARGEST_FILE)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
