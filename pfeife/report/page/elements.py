"""HTML as text; whatever is not HTML already is escaped."""

from collections.abc import Iterable, Sequence
from html import escape

OPEN = 12  # rows of a table that is open


class Html(str):
    """Text that is HTML."""


def text(value: object) -> Html:
    """A value as HTML."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def tag(_name: str, *inside: object, **attributes: object) -> Html:
    """An element; the attribute `class_` is class, and what is None or False is left out."""
    # The first parameter is `_name`, so that an element may have the attribute `name`.
    attribute_text = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        if value is not True
        else f" {name}"
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{_name}{attribute_text}>{''.join(map(text, inside))}</{_name}>")


def lines(parts: Iterable[object]) -> Html:
    """One after the other."""
    return Html("\n".join(map(text, parts)))


def table(
    rows: Sequence[Sequence[object]], head: Sequence[str], caption: str, most: int = OPEN
) -> Html:
    """Cells under their heads; columns of numbers are aligned to the right, empty ones left out.
    One of more than so many rows is closed."""
    # Escaped first: a cell may be HTML already, and an empty one is told by its text.
    columns = [(title, list(map(text, cells))) for title, *cells in zip(head, *rows, strict=True)]
    columns = [(title, cells) for title, cells in columns if any(cells)]
    classes = [_class(cells) for _, cells in columns]
    kinds = list(zip(columns, classes, strict=True))
    titles = (tag("th", title, scope="col", class_=kind) for (title, _), kind in kinds)
    body = (
        tag("tr", *(tag("td", cells[at], class_=kind) for (_, cells), kind in kinds))
        for at in range(len(rows))
    )
    inside = tag("thead", tag("tr", *titles)), tag("tbody", *body)
    whole = tag("div", tag("table", *inside), class_="wide")
    return tag("details", tag("summary", caption), whole, open=len(rows) <= most)


def _class(cells: Sequence[str]) -> str | None:
    """How a column is aligned."""
    return "number" if all(cell[:1].isdigit() for cell in cells if cell) else None
