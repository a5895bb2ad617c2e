"""The libraries of the extra `report`; they are imported when something is drawn."""

import contextlib
from collections.abc import Iterator
from typing import Any


class Missing(ImportError, ValueError):
    """A library that is not installed; the command line says so in a line."""


def plotly() -> Any:
    """The library, with what pages need of it. Raises ImportError that says how to install it."""
    with _how_to_install("plotly"):
        import plotly
        import plotly.graph_objects
        import plotly.io.json
        import plotly.offline
    return plotly


def matplotlib() -> Any:
    """The library, with what pictures need of it. Raises ImportError that says how to install
    it."""
    with _how_to_install("matplotlib"):
        import matplotlib
        import matplotlib.colors
        import matplotlib.figure
        import matplotlib.patches
    return matplotlib


def pydot() -> Any:
    """The library. Raises ImportError that says how to install it."""
    with _how_to_install("pydot"):
        import pydot
    return pydot


@contextlib.contextmanager
def _how_to_install(name: str) -> Iterator[None]:
    """How to install a library that is missing."""
    try:
        yield
    except ImportError as error:
        raise Missing(
            f"this is drawn by {name}, which is not installed: pip install 'pfeife[report]'"
        ) from error
