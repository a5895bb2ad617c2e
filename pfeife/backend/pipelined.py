"""What `pfeife.compile` returns: a step with the signature of the one that it was given."""

import functools
import os
from collections.abc import Callable
from types import MethodType
from typing import Any, Generic, ParamSpec, Self, TypeVar

import torch

from pfeife.backend.entry import Backend
from pfeife.backend.reporting import write_report

P = ParamSpec("P")
R = TypeVar("R")
_SHOWN = 8  # of what was compiled, in a `repr`


class PipelinedStep(Generic[P, R]):
    """A step that runs as a pipeline, called as the step is.

    `backend` has the `Options`, and what was compiled (`backend.compiled[-1].program` is a
    `Program`, `.plan` its `Plan`, `.schedule` the order of it all); `report` shows it. Otherwise it
    is like a function: it is bound as a method, has the name and the attributes of the step, is
    copied as itself, and is pickled by its name."""

    __wrapped__: Callable[P, R]
    __qualname__: str

    def __init__(
        self, step: Callable[P, R], run: Callable[[tuple[Any, ...], dict[str, Any]], R], by: Backend
    ):
        functools.update_wrapper(self, step)
        self._run = run
        self.backend = by

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():  # inside of another step
            return self.__wrapped__(*args, **kwargs)
        return self._run(args, kwargs)

    def report(self, path: str | os.PathLike[str], *args: P.args, **kwargs: P.kwargs) -> None:
        """Writes what was compiled last as one HTML page, which needs no network: its passes,
        stages, predicted timeline and memory, and what a search has tried.

        With the arguments of a call, that call is compiled and measured, too: the step runs, and
        leaves nothing behind (no gradients, no buffers, no random numbers). Under torchrun every
        rank calls this, and rank 0 writes. Raises ValueError if nothing was compiled, and what the
        call raises; ImportError without plotly (`pip install 'pfeife[report]'`).
        """
        write_report(path, self.__qualname__, self.backend, self._run, args, kwargs)

    def __repr__(self) -> str:
        kept = self.backend.compiled
        lines = [f"  {one.summary}" for one in kept[-_SHOWN:]] or ["  not called yet"]
        more = [f"  ... and {len(kept) - _SHOWN} others"] * (len(kept) > _SHOWN)
        return "\n".join([f"PipelinedStep of {self.__qualname__}:", *lines, *more])

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> str:
        return self.__qualname__
