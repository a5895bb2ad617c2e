"""What `pfeife.compile` returns: a step with the signature of the one that it was given."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, Generic, ParamSpec, Self, TypeVar

import torch

from pfeife.backend.entry import Backend

P = ParamSpec("P")
R = TypeVar("R")


class PipelinedStep(Generic[P, R]):
    """A step that runs as a pipeline, called as the step is.

    `backend` has the options and what was compiled. Otherwise it is like a function: it is bound
    as a method, has the name and the attributes of the step, is copied as itself, and is pickled
    by its name.
    """

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

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> str:
        return self.__qualname__
