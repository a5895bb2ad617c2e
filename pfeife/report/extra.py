"""What the libraries of the extra `report` give; they are imported when something is drawn."""

from typing import Any


def plotly_script() -> str:
    """plotly.js. Raises ImportError that says how to install it."""
    try:
        from plotly import offline
    except ImportError as error:
        raise _missing("plotly") from error
    return str(offline.get_plotlyjs())


def canvas(width: float, height: float) -> Any:
    """An empty figure of matplotlib, in inches. Raises ImportError that says how to install it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise _missing("matplotlib") from error
    return Figure((width, height))


def _missing(name: str) -> ImportError:
    return ImportError(
        f"this is drawn by {name}, which is not installed: pip install 'pfeife[report]'"
    )
