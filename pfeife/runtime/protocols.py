"""What a runtime is: a pipeline that starts steps.

`LocalPipeline` and `DistributedPipeline` are two; a third one is a class with these methods, which
the backend's option `runtime` takes.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from pfeife.data.schedule import Schedule
from pfeife.ir.evaluate import Result, State
from pfeife.ir.program import Program
from pfeife.runtime.step import Watch


class StepProtocol(Protocol):
    """One step: all microbatches once."""

    def run(
        self, *, forward: bool = True, backward: bool = True, watch: Watch | None = None
    ) -> None:
        """Runs the forwards, the backwards, or (with both) the whole schedule in its order;
        `watch(rank)` is told of that rank's actions. Raises what an action raised."""

    def set_tangents(self, tangents: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """The gradients that arrive at the outputs, by microbatches, before the backwards run."""

    def result(self, *, outputs: bool = True) -> Result:
        """What `evaluate` of the program gives, of what has run so far."""

    def preparing(self) -> contextlib.AbstractContextManager[None]:
        """While the caller makes the tangents; a world of several processes is told so."""

    def compare(self, tangents: Sequence[Mapping[str, torch.Tensor]], *, values: bool) -> None:
        """Raises if other processes were given other tangents."""


class Pipeline(Protocol):
    """A program with its lowered schedule, ready to run any number of steps."""

    @property
    def gradients(self) -> frozenset[str]:
        """The parameters whose gradients a step's result has in this process."""

    def start(
        self,
        state: State,
        microbatches: Sequence[Any],
        *,
        seed: int = 0,
        tangents: Sequence[Mapping[str, torch.Tensor]] | None = None,
        scale: float = 1.0,
    ) -> StepProtocol:
        """A step that has not run yet, with the arguments of `evaluate`."""


# Makes a pipeline of a program of ranks, its lowered schedule and compiled bodies (by call nodes).
Runtime = Callable[[Program, Schedule, Mapping[str, Callable]], Pipeline]
