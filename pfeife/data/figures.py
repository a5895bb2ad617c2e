"""What a step has taken, measured on all ranks: data for a callback, and for a line of the log."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs


@attrs.frozen
class StepFigures:
    """One call of a step that trains, or the mean of several.

    `seconds` are those of the call, and of the backward where the loss is outside of the step;
    `outside_seconds` those between it and the one before (the optimizer, the loader, the rest of
    the loop). `samples` are the rows of the batch, that of all replicas; `tokens` the elements of
    its first tensor of integers that has several dimensions, 0 if there is none. `flops` are the
    operations of the model's forward and backward by torch's formulas, without what is recomputed;
    `peak_seconds` is how long all ranks would take for these at the peak of their `machine`.

    By rank: `waiting_seconds`, in which it waits for others inside of the step (none on CUDA, where
    the host does not wait); by process: `peak_bytes`, the most so far of memory that is resident
    (all of the process, on the CPU) or allocated (on CUDA); by rank: `account_bytes`, what the
    account of memory has for its peak.
    """

    step: int
    seconds: float
    outside_seconds: float
    samples: float
    tokens: float
    flops: float
    peak_seconds: float
    machine: str
    waiting_seconds: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    account_bytes: tuple[int, ...] = ()

    @property
    def whole_seconds(self) -> float:
        """From one step to the next."""
        return self.seconds + self.outside_seconds

    @property
    def samples_per_second(self) -> float:
        """Rows of all replicas."""
        return self.samples / self.whole_seconds

    @property
    def tokens_per_second(self) -> float:
        """Elements of the batch's first tensor of integers, of all replicas."""
        return self.tokens / self.whole_seconds

    @property
    def flops_per_second(self) -> float:
        """Of all ranks together."""
        return self.flops / self.whole_seconds

    @property
    def utilization(self) -> float:
        """The share of the machines' peak (model FLOP/s utilization; Chowdhery et al., PaLM, 2022,
        appendix B)."""
        return self.peak_seconds / self.whole_seconds

    def as_dict(self) -> dict[str, Any]:
        """All figures by their names, those that are computed of others too, for JSON or a
        tracker; `mfu` is the utilization."""
        computed = ("whole_seconds", "samples_per_second", "tokens_per_second", "flops_per_second")
        return {
            **attrs.asdict(self),
            **{name: getattr(self, name) for name in computed},
            "mfu": self.utilization,
        }

    @property
    def waits_most(self) -> int | None:
        """The rank that waits longest, None where that is not measured."""
        seconds = self.waiting_seconds
        return seconds.index(max(seconds)) if seconds else None


OnStep = Callable[[StepFigures], object]


def mean_of(figures: Sequence[StepFigures]) -> StepFigures:
    """The means of several; the step and the bytes are those of the last one."""
    last, count = figures[-1], len(figures)
    names = ("seconds", "outside_seconds", "samples", "tokens", "flops", "peak_seconds")
    # Sums of steps over their number, not means of rates: a rate of all steps is then right too.
    means = {name: sum(getattr(step, name) for step in figures) / count for name in names}
    # By rank its seconds in each of the steps; none at all where a step has none (CUDA).
    waiting = zip(*(step.waiting_seconds for step in figures), strict=False)
    return attrs.evolve(
        last, **means, waiting_seconds=tuple(sum(seconds) / count for seconds in waiting)
    )
