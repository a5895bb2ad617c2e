"""The edges of a step: what an ordinary script does there, and what must come of it.

A module a topic, each with rows: `@edge()` over a function that asserts what is right, or
`@edge("first words of the error")` over one that must be refused. `ranks` says in how many
processes the row runs; `tests/test_edges.py` is the table.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs

TOPICS = (
    "attributes",
    "autocast",
    "autograd",
    "batch",
    "dynamo",
    "hang",
    "memory",
    "ranks",
    "reductions",
    "state",
    "words",
)


@attrs.frozen
class Edge:
    """One row; `refused` is how the error begins, "" where the row must be right."""

    name: str
    run: Callable[[], None]
    refused: str = ""
    ranks: tuple[int, ...] = (1,)


def edge(refused: str = "", ranks: tuple[int, ...] = (1,)) -> Callable:
    """Makes a row of a function; all rows of a module come in their order."""

    def note(run: Callable[[], None]) -> Callable[[], None]:
        rows = run.__globals__.setdefault("ROWS", {})
        rows[run.__name__] = Edge(run.__name__, run, refused, ranks)
        return run

    return note


@contextmanager
def said() -> Iterator[list[str]]:
    """What is logged or warned meanwhile; logged only on rank 0."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("pfeife")
    log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield found
        found += [str(one.message) for one in warned if "microbatches count" in str(one.message)]
    finally:
        log.removeHandler(handler)
