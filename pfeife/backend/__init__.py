"""The way in for an unchanged training loop: torch.compile's backend, and `pfeife.compile`.

`step` is the way of a call of `pfeife.compile`, whose result is in `pipelined`, `entry` that of
torch.compile's, `settings/` what may be asked for. Read these first; `doors/` are how a step
becomes a graph, `step_modules` is what a step is, reads and returns, `graphs` has a graph of a
microbatch, `batched_graph` one of the whole batch, and `steps` what is built of either.
`call_texts` is what ranks compare of a call, `context` what all steps share, `graph_breaks` and
`graph_break_steps` are for a step which Dynamo has broken.
`building/` makes a pipeline of a graph, `calls/` runs it, `state/` saves and loads what it trains;
`explain` says what would become of a step, `reporting` shows what did.
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
