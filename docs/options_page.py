"""Writes docs/options.md from the table of options: `python docs/options_page.py`."""

from itertools import groupby
from pathlib import Path

from pfeife.backend.settings.options import Row, rows

PAGE = Path(__file__).parent / "options.md"
INTRODUCTION = """\
# Options

All options of `pfeife.compile(step, **options)`,
`torch.compile(step, backend="pfeife", options={...}, dynamic=True)` \
and `pfeife.backend(**options)`.
An option that does not exist, or a wrong value, raises a `ValueError` before anything runs.
The last column says what the option does; the middle one is its default.
"""


def page() -> str:
    """The page: a section for each class of the table."""
    text = INTRODUCTION
    for section, each in groupby(rows(), key=lambda row: row.section):
        text += f"\n## {section}\n\n| option | default | meaning |\n|---|---|---|\n"
        text += "".join(f"{line(row)}\n" for row in each)
    return text


def line(row: Row) -> str:
    """`| name | default | meaning |`."""
    default = f'"{row.default}"' if isinstance(row.default, str) else repr(row.default)
    return f"| `{row.name}` | `{default}` | {row.meaning} |"


if __name__ == "__main__":
    PAGE.write_text(page())
