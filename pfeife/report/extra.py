"""The libraries of the extra `report`; they are imported when something is drawn."""

from typing import Any


class Missing(ImportError, ValueError):
    """A library that is not installed; the command line says so in a line."""


def plotly_script() -> str:
    """plotly.js. Raises ImportError that says how to install it."""
    try:
        from plotly import offline
    except ImportError as error:
        raise _missing("plotly") from error
    return str(offline.get_plotlyjs())


def matplotlib() -> Any:
    """The library, with what pictures need of it. Raises ImportError that says how to install
    it."""
    try:
        import matplotlib
        import matplotlib.figure
        import matplotlib.patches
        import matplotlib.path
    except ImportError as error:
        raise _missing("matplotlib") from error
    return matplotlib


def pydot() -> Any:
    """The library. Raises ImportError that says how to install it."""
    try:
        import pydot as found
    except ImportError as error:
        raise _missing("pydot") from error
    return found


def _missing(name: str) -> Missing:
    return Missing(f"this is drawn by {name}, which is not installed: pip install 'pfeife[report]'")
