"""What a command gives back: files that were asked for, and what is printed."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path


def writable(*paths: str | None) -> None:
    """Raises ValueError for a file in a folder that is not there, before minutes of work."""
    for path in paths:
        if path and path != "-" and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"{path}: there is no such folder")


def write(path: str, text: str) -> None:
    """Writes a text at once."""
    from pfeife.data import files

    files.write_text(Path(path), text)


def deliver(
    options: argparse.Namespace,
    *,
    data: str,
    rows: str,
    text: str,
    save: Callable[[str], None] | None = None,
) -> str:
    """Writes the JSON `data` and the CSV `rows` to the files of --json and --csv. Returns what is
    printed: that of the two whose file is "-", or else the text. `save` writes a file of JSON
    that is more than `data`."""
    if options.json not in (None, "-"):
        save(options.json) if save else write(options.json, data)
    if options.csv not in (None, "-"):
        write(options.csv, rows)
    if options.json == "-":
        return data
    return rows.rstrip("\n") if options.csv == "-" else text


def terminal() -> int:
    """How wide a table may be: the terminal, COLUMNS, or 100 letters where neither is known."""
    return shutil.get_terminal_size((100, 24)).columns


def in_a_line(error: Exception) -> str:
    """What an error says, without the ends of its lines."""
    return " ".join(str(error).split())
