"""The way in for an unchanged training loop: torch.compile's backend, and `pfeife.compile`.

`step` is the way of a call of `pfeife.compile`, whose result is in `pipelined`, `entry` that of
torch.compile's, `settings/` what may be asked for. Read these first; `doors/` are how a step
becomes one of its `graphs/`, `step_modules` is what a step is, reads and returns, `steps` what is
built of a graph, and `graph_break_steps` of those of a step which Dynamo has broken.
`building/` makes a pipeline of a graph, `calls/` runs it, `shared/` is what all steps share,
`state/` saves and loads what they train; `explain` says what would become of a step.
"""

import sys
from types import ModuleType
from typing import Any

from pfeife.backend.entry import Backend, backend, entry
from pfeife.backend.settings.options import Options
from pfeife.backend.settings.options_typed import with_more_options

__all__ = ["Backend", "backend", "entry"]


class _Callable(ModuleType):
    """`pfeife.backend` is this folder and, as ever, a function: `pfeife.backend(**options)`."""

    @with_more_options(Options)
    def __call__(self, **options: Any) -> Backend:
        return backend(**options)


sys.modules[__name__].__class__ = _Callable
