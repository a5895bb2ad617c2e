"""What `pfeife.compile` returns: a step with the signature of the one that it was given."""

import functools
import os
from collections.abc import Callable
from types import MethodType
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar, cast

import torch

from pfeife.backend.entry import Backend
from pfeife.backend.settings.brief import Brief
from pfeife.backend.settings.options import Options
from pfeife.backend.settings.options_typed import Q, with_help
from pfeife.backend.shared.reporting import write_report

P = ParamSpec("P")
R = TypeVar("R")
_SHOWN = 8  # of what was compiled, in a `repr`
_NEXT = (
    "  .backend.options: its Options",
    "  .backend.compiled[-1]: the last one's .program (a Program), .plan (its Plan), .schedule "
    "(a Schedule)",
)


class PipelinedStep(Generic[P, R], metaclass=Brief):
    """A step that runs as a pipeline, called as the step is.

    `backend.options` has its `Options`, and `backend.compiled` what was compiled, the last one at
    the end: `backend.compiled[-1].program` is a `Program`, `.plan` its `Plan`, `.schedule` the
    `Schedule` of its ranks, `.history` what every pass has made; each of them prints. `report`
    shows all of it on a page.

    Otherwise it is like a function: it is bound as a method, has the name and the attributes of the
    step, is copied as itself, and is pickled by its name."""

    __wrapped__: Callable[P, R]
    __qualname__: str

    def __init__(
        self, step: Callable[P, R], run: Callable[[tuple[Any, ...], dict[str, Any]], R], by: Backend
    ):
        functools.update_wrapper(self, step)
        # A module has no name of its own.
        self.__qualname__ = getattr(step, "__qualname__", type(step).__name__)
        self._run = run
        self.backend = by

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # The outer one is compiled as a whole, with what is inside of it as it was written.
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
        """What was compiled, a line each, and where to look next."""
        compiled = self.backend.compiled
        lines = [f"  {each.summary}" for each in compiled[-_SHOWN:]] or ["  not called yet"]
        more = [f"  ... and {len(compiled) - _SHOWN} others"] * (len(compiled) > _SHOWN)
        return "\n".join([f"PipelinedStep of {self.__qualname__}:", *lines, *more, *_NEXT])

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> str:
        return self.__qualname__


class Compile(Protocol[Q]):
    """`pfeife.compile` with the keywords `Q`, for type checkers: its result is called as the step
    is."""

    def __call__(
        self, step: Callable[P, R], *args: Q.args, **kwargs: Q.kwargs
    ) -> PipelinedStep[P, R]:
        """See `pfeife.compile`."""


def compiles(options: Callable[Q, Options]) -> Callable[[Callable[..., Any]], Compile[Q]]:
    """A decorator of `pfeife.compile`: it takes these options."""
    return lambda function: cast(Compile[Q], with_help(function))
