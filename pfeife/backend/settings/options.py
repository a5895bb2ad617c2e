"""What a user may ask of the backend, checked before anything runs."""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import attrs
import torch

from pfeife.backend.settings.brief import Brief
from pfeife.backend.settings.option_checks import check_together
from pfeife.backend.settings.option_table import (
    BatchOptions,
    CaptureOptions,
    CostOptions,
    CutOptions,
    MemoryOptions,
    PrecisionOptions,
    ReplicaOptions,
    ResultOptions,
    RunOptions,
    ScheduleOptions,
    ShownOptions,
)
from pfeife.data.replicas import Replicas
from pfeife.runtime.distributed.batches.meshes import mesh_of
from pfeife.version import VERSION

SECTIONS: tuple[type[attrs.AttrsInstance], ...] = (
    *(BatchOptions, CutOptions, ScheduleOptions, ReplicaOptions, CostOptions, MemoryOptions),
    *(PrecisionOptions, ResultOptions, CaptureOptions, RunOptions, ShownOptions),
)
FIELDS = [field for section in SECTIONS for field in attrs.fields(section)]


@attrs.frozen
class Row:
    """An option as people read of it: `meaning` is Markdown, with links to pages of docs/."""

    section: str
    name: str
    default: Any
    meaning: str

    @property
    def plain(self) -> str:
        """Its meaning without links."""
        return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", self.meaning)


def rows() -> Iterator[Row]:
    """The table of options, by sections."""
    for section in SECTIONS:
        heading, _, listed = inspect.cleandoc(section.__doc__ or "").partition("\n\n")
        fields = {field.name: field for field in attrs.fields(section)}
        meanings = re.findall(r"^(\w+): (.*(?:\n    .*)*)", listed, re.MULTILINE)
        assert [name for name, _ in meanings] == [*fields], f"{section.__name__}: a line a field"
        for name, text in meanings:
            default = fields[name].default
            value = default.factory() if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]
            yield Row(heading.rstrip("."), name, value, " ".join(text.split()))


@attrs.frozen(kw_only=True, repr=False, slots=False)
class Options(
    BatchOptions,
    CutOptions,
    ScheduleOptions,
    ReplicaOptions,
    CostOptions,
    MemoryOptions,
    PrecisionOptions,
    ResultOptions,
    CaptureOptions,
    RunOptions,
    ShownOptions,
    metaclass=Brief,
):
    """Options of `pfeife.compile(step, ...)`, and of `torch.compile(step, backend="pfeife",
    options={...})`.

    Its attributes are the options, of which `help(pfeife.compile)` and docs/options.md say what
    each means: `print(options)` shows those that are not as usual, `options.texts` all. What is
    built by them is in `step.backend.compiled`: a `Program`, its `Plan` and its `Schedule`.
    """

    # As people read it: the names and defaults on a few lines, where the types are a page.
    __signature__ = inspect.Signature(
        [
            inspect.Parameter(row.name, inspect.Parameter.KEYWORD_ONLY, default=row.default)
            for row in rows()
        ]
    )

    @property
    def apart(self) -> int:
        """How many replicas are given batches of their own."""
        return self.replicas if self.batch == "replica" else 1

    @property
    def cut(self) -> int:
        """Into how many microbatches the batch is cut that one rank is given."""
        return self.microbatches // self.apart

    def __attrs_post_init__(self) -> None:
        if self.microbatches % self.replicas:
            raise ValueError(
                f"options microbatches={self.microbatches} and replicas={self.replicas}: "
                "every replica takes the same number of microbatches"
            )

    @property
    def texts(self) -> dict[str, str]:
        """What every option is, as all ranks write it."""
        shown = ((field, getattr(self, field.name)) for field in FIELDS if field.repr)
        return {f.name: f.repr(value) if callable(f.repr) else repr(value) for f, value in shown}

    @property
    def changed(self) -> list[str]:
        """`name=text` of each option that is not what it is anyway."""
        usual = Options().texts
        return [f"{name}={text}" for name, text in self.texts.items() if text != usual[name]]

    def __repr__(self) -> str:
        """Those that are not what they are anyway."""
        return f"Options({', '.join(self.changed)})"

    def replicated(self, owners: Mapping[str, int | None]) -> Replicas:
        """What these options say of replicas; `owners` are those that train state already."""
        how, apart = self.data_parallel, self.apart > 1
        return Replicas(self.replicas, how, self.bucket_bytes, owners, apart)


def versions() -> tuple[str, ...]:
    """What must be the same on every rank beside the program."""
    python = ".".join(map(str, sys.version_info[:2]))
    return f"torch {torch.__version__}", f"pfeife {VERSION}", f"Python {python}"


def options_from(options: Mapping[str, Any]) -> Options:
    """Options from a mapping. Raises ValueError for a name that is none, or a wrong value."""
    names = [field.name for field in FIELDS]
    unknown = sorted(map(str, set(options) - set(names)))
    if unknown:
        # A misspelled option is told from an invented one.
        near = [close for name in unknown for close in get_close_matches(name, names, n=1)]
        meant = f"did you mean {near}?" if near else f"there are {names}"
        raise ValueError(f"unknown options {unknown}; {meant}")
    # A mesh counts replicas and members, so that they need not be said; before any check looks at
    # them.
    mesh = mesh_of(options.get("mesh"))
    if mesh is not None:
        counts = {"replicas": mesh.replicas, "members": mesh.members}
        for name, count in counts.items():
            if options.get(name, count) != count:
                raise ValueError(
                    f"options {name}={options[name]} and mesh={options['mesh']!r}, which has "
                    f"{count}: leave the first one out"
                )
        options = {**options, "mesh": mesh, **counts}
    made = Options(**options)
    check_together(made)
    return made
