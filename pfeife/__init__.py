"""Automatic pipeline parallelism for PyTorch, as pure functions over torch.fx graphs.

`__init__.pyi` lists what is here. It is imported when it is asked for: torch's compilers, which
most of it needs, take seconds.
"""

import ast
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from pfeife.version import VERSION

__version__ = VERSION
_LISTED = ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
_PLACES = {
    name.name: statement.module
    for statement in _LISTED
    if isinstance(statement, ast.ImportFrom)
    for name in statement.names
}
__all__ = sorted(_PLACES)
_FOLDERS = ("cost", "integrations", "report", "runtime", "sched", "testing")  # of the reference


def __getattr__(name: str) -> Any:
    """A folder of the package (`backend` can be called as well), or a name of those."""
    if importlib.util.find_spec(f"pfeife.{name}") is not None:
        attribute = importlib.import_module(f"pfeife.{name}")
    elif name in _PLACES:
        attribute = getattr(importlib.import_module(_PLACES[name]), name)
    else:
        raise AttributeError(f"module 'pfeife' has no attribute {name!r}")
    globals()[name] = attribute  # the next access does not come here
    return attribute


def __dir__() -> list[str]:
    return [*__all__, *_FOLDERS, "__version__"]
