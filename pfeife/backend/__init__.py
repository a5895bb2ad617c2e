"""The way in for an unchanged training loop: torch.compile's backend, and `pfeife.compile`.

`step` (its result is in `pipelined`) and `entry` are the two doors, `options` what may be asked for
(`asked` has the types of that for those who ask). Read these first; `reached` is what a step is,
reads and returns, `graphs` has what Dynamo hands over and `steps` what is built of it, `context`
what all steps share, `pieces` and `piece_steps` those of a step which Dynamo has broken; `decide`
asks the planner, `layout` which ranks are pipelines, `builder` and `build` make a pipeline of it
(`compiled`), `call` runs that, `function` does so for autograd, `loss_scale` knows with which
gradient of the loss, `changed` writes to arguments what the step changes of them in place, `meter`
measures a call; `residence` has state of one process where it is used; `explain` says what would
become of a step, `given` checks decisions and functions that are options, `declared` has the sizes
that a caller says will come, `state` reads state that is on other ranks, `checkpoints` saves and
loads it (`restoring` has the model and optimizers, `beside` what else there is), `safetensors`
writes models for others, `synced` refuses norms that are, and `unchanged` passes of the caller's
that compute something else, `values` sees to those of models that were made without, `artifacts`
writes what was decided, and `reporting` shows it.
"""

import sys
from types import ModuleType
from typing import Unpack

from pfeife.backend.asked import Asked
from pfeife.backend.entry import Backend, backend, entry

__all__ = ["Backend", "backend", "entry"]


class _Callable(ModuleType):
    """`pfeife.backend` is this folder and, as ever, a function: `pfeife.backend(**options)`."""

    def __call__(self, **options: Unpack[Asked]) -> Backend:
        return backend(**options)


sys.modules[__name__].__class__ = _Callable
