"""What the runtimes have in common: how a step is started, and how it is called."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch

from pfeife.data.schedule import Schedule
from pfeife.ir.combine import loss_divisors, loss_tangents
from pfeife.ir.editing.absorb import absorb
from pfeife.ir.evaluate import Result, State
from pfeife.ir.microbatch import named_batch, step_inputs
from pfeife.ir.program import Program
from pfeife.runtime.step import Part, Step, Watch

Tangents = Sequence[Mapping[str, torch.Tensor]]  # of the outputs, per microbatch by port name


class PipelineStep(ABC):
    """One step of a pipeline, which may be run phase by phase; `steps` are those of its ranks
    here."""

    steps: list[Step]

    @property
    @abstractmethod
    def waiting(self) -> tuple[float, ...]:
        """Once it has a result: the seconds in which each rank of the world waited for others, none
        where that cannot be seen."""

    @property
    @abstractmethod
    def peaks(self) -> tuple[int, ...]:
        """Once it has a result: the bytes of each process at its peak so far."""

    @abstractmethod
    def run(
        self, *, forward: bool = True, backward: bool = True, watch: Watch | None = None
    ) -> None:
        """Runs the forward actions, the backward actions, or all; `watch` sees them."""

    @abstractmethod
    def result(self, *, outputs: bool = True) -> Result:
        """What the step gives, once it has run."""

    def preparing(self) -> AbstractContextManager[None]:
        """While the backward is prepared."""
        return nullcontext()

    @abstractmethod
    def compare(self, tangents: Tangents, *, values: bool) -> None:
        """Raises CollectiveError on all ranks unless they are at a backward from the same outputs,
        with `values` also unless they have the same gradients of these."""

    def set_tangents(self, tangents: Tangents) -> None:
        """The gradients of the outputs, before the backward."""
        for step in self.steps:
            own_tangents = tangents[step.part.first : step.part.first + len(step.values)]
            for values, gradients in zip(step.values, own_tangents, strict=True):
                values.update(moved(gradients, step.transport.device))


S = TypeVar("S", bound=PipelineStep)


class Pipeline(ABC, Generic[S]):
    """A program and its lowered schedule, ready to run steps of `microbatches` microbatches."""

    def __init__(self, program: Program, schedule: Schedule):
        self.program, self.schedule = absorb(program), schedule
        self.microbatches = schedule.microbatches * program.replicas

    def start(
        self,
        state: State,
        microbatches: Sequence[Any],
        *,
        seed: int = 0,
        tangents: Tangents | None = None,
        scale: float = 1.0,
    ) -> S:
        """A step that has not run yet. Raises ValueError for inputs that do not fit."""
        with self._starting() as replicas:
            parts = parts_of(
                self.program,
                microbatches,
                seed=seed,
                tangents=tangents,
                scale=scale,
                replicas=replicas,
            )
            return self._started(state, parts)

    def __call__(self, state: State, microbatches: Sequence[Any], **options: Any) -> Result:
        """One step: the same arguments as `evaluate`."""
        step = self.start(state, microbatches, **options)
        step.run()
        return step.result()

    @abstractmethod
    def _starting(self) -> AbstractContextManager[range]:
        """While inputs are checked; says which replicas run here."""

    @abstractmethod
    def _started(self, state: State, parts: Sequence[Part]) -> S:
        """The step, of a part for each replica that runs here."""


def parts_of(
    program: Program,
    microbatches: Sequence[Any],
    *,
    seed: int = 0,
    tangents: Tangents | None = None,
    scale: float = 1.0,
    replicas: Iterable[int] | None = None,
) -> list[Part]:
    """The inputs of a step, of which every replica gets an equal part: those of all, or of some
    `replicas`. The other arguments are those of `evaluate`. Raises ValueError for inputs that do
    not fit."""
    share, left = divmod(len(microbatches), program.replicas)
    if left:
        raise ValueError(f"{len(microbatches)} microbatches for {program.replicas} replicas")
    divided = loss_divisors(program, microbatches)
    arriving = loss_tangents(program, divided, scale)

    def inputs(index: int) -> dict[str, torch.Tensor]:
        batch = named_batch(program, microbatches[index], index)
        output_tangents = tangents[index] if tangents is not None else None
        return arriving[index] | step_inputs(program, batch, index, seed, output_tangents)

    chosen = range(program.replicas) if replicas is None else replicas
    ranges = [range(replica * share, (replica + 1) * share) for replica in chosen]
    return [
        Part(
            indices.start,
            [inputs(index) for index in indices],
            divided[indices.start : indices.stop],
        )
        for indices in ranges
    ]


def moved(values: Mapping[str, Any], device: torch.device | None) -> dict[str, Any]:
    """The values on a device, None for where they are; sizes are numbers, and nowhere."""
    if device is None:
        return dict(values)
    return {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in values.items()}
