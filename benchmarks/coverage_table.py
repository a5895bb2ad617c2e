"""What benchmarks/coverage.py prints, in Markdown."""

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

Row = dict[str, Any]
PACKAGES = (
    "torch", "transformers", "diffusers", "timm", "torchvision", "torchaudio", "torch_geometric"
)  # fmt: skip
KINDS = ("right, bitwise", "right, rounding", "WRONG", "refused", "failed")
LONGEST = 300  # characters of a cause


def markdown(rows: Sequence[Row]) -> str:
    """Totals, totals by family and by cause, and a line a model."""
    fit = [row for row in rows if row["verdict"] != "unfit"]
    counts = Counter(map(kind, fit))
    right = sum(count for name, count in counts.items() if name.startswith("right"))
    parts = [
        "# Other people's models",
        f"By `python benchmarks/coverage.py`, with {_versions()}. What the columns are stands in "
        "that file.",
        f"**{right} of {len(fit)} right ({100 * right / max(1, len(fit)):.0f} %)**: "
        + ", ".join(f"{counts[name]} {name}" for name in KINDS)
        + ".",
        "Tried on " + "; ".join(_ways(fit)) + ".",
        _times(fit),
        "## By family",
        table(("family", "models", *KINDS), _families(fit)),
        "## By cause",
        table(("models", "verdict", "cause", "such as"), _causes(rows)),
        "## All models",
        table(
            (
                *("model", "verdict", "error to eager", "to aot_eager", "door", "graphs"),
                *("balance", "s", "aot_eager s"),
            ),
            map(_line, rows),
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def programs(rows: Sequence[Row]) -> str:
    """How many models take one program for all shapes after the first one."""
    right = [row for row in rows if row["verdict"] == "right"]
    counts = Counter("one" if row["programs"] <= 2 else "more" for row in right)
    share = 100 * counts["one"] / max(1, len(right))
    verdicts = Counter(row["verdict"] for row in rows)
    return f"{dict(verdicts)}; of those right {counts['one']} ({share:.0f} %) take one program"


def kind(row: Row) -> str:
    if row["verdict"] != "right":
        return str(row["verdict"])
    return "right, rounding" if row["error"] else "right, bitwise"


def table(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    rows = ["| " + " | ".join(_cell(value) for value in line) + " |" for line in lines]
    if not rows:
        return "None."
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *rows])


def general(cause: str) -> str:
    """A cause without what is the model's own: its numbers and quoted names."""
    first = cause.strip().split("\n")[0]
    first = re.sub(r"\S+\.py:\d+", "FILE", first)
    first = re.sub(r"'[^']*'", "'...'", first)
    return re.sub(r"\d[\d.e+-]*", "N", first)[:90]


def _families(rows: Sequence[Row]) -> list[list[Any]]:
    families = dict.fromkeys(row["family"] for row in rows)
    lines = []
    for family in families:
        counts = Counter(kind(row) for row in rows if row["family"] == family)
        lines.append([family, counts.total(), *(counts[name] or "" for name in KINDS)])
    return lines


def _causes(rows: Sequence[Row]) -> list[list[Any]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["verdict"] != "right":
            groups.setdefault((row["verdict"], general(row["cause"])), []).append(row)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return [
        [
            len(found),
            verdict,
            _first_line(found[0]["cause"])[:LONGEST],
            ", ".join(row["name"] for row in found),
        ]
        for (verdict, _), found in ordered
    ]


def _first_line(cause: str) -> str:
    """Without where packages lie on this machine."""
    return re.sub(
        r'(["`])[^"`]*/(site-packages|coverage_models)/', r"\1", cause.strip().split("\n")[0]
    )


def _line(row: Row) -> list[Any]:
    errors = [row.get(key) for key in ("error", "compiled_error")]
    return [
        f"{row['family']}/{row['name']}",
        row["verdict"],
        *("" if one is None else f"{one:.0e}" if one else "0" for one in errors),
        row.get("door", ""),
        *("" if row.get(key) is None else row[key] for key in ("graphs", "balance")),
        *(f"{row[key]:.1f}" if row.get(key) else "" for key in ("seconds", "aot_seconds")),
    ]


def _ways(rows: Sequence[Row]) -> list[str]:
    counts = Counter(way for row in rows for way in row.get("ways", ()))
    return [f"{way}: {count} models" for way, count in counts.items()]


def _times(rows: Sequence[Row]) -> str:
    both = [r for r in rows if r.get("seconds") and r.get("aot_seconds")]
    if not both:
        return ""
    ratios = [row["seconds"] / row["aot_seconds"] for row in both]
    return (
        f"The first call and its backward took {statistics.median(ratios):.1f} times (median of "
        f"{len(both)}) as long as those of one microbatch by `aot_eager`, which took a median of "
        f"{statistics.median(row['aot_seconds'] for row in both):.1f} s."
    )


def _versions() -> str:
    return ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
