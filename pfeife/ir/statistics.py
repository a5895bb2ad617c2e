"""Statistics of batch norms over all microbatches of a step: how they are put together, once."""

from collections.abc import Mapping, Sequence

import torch

from pfeife import _torch
from pfeife.ir.parts import Tracked
from pfeife.ir.program import Program

Named = Mapping[str, torch.Tensor]


def tracked_names(program: Program) -> frozenset[str]:
    """The buffers that a step updates once, from what each of its microbatches has found."""
    names = (name for norm in program.tracked for name in (norm.mean, norm.variance, norm.count))
    return frozenset(name for name in names if name is not None)


def tracked(
    program: Program,
    before: Named,
    microbatches: Sequence[Mapping[str, torch.Tensor]],
    sizes: Mapping[str, int],
) -> dict[str, torch.Tensor]:
    """The new values of such buffers, of those that are given from `before` the step;
    `microbatches` has of each one its mean and unbiased variance, and the new count; `sizes` are
    the values of the size ports.

    With n elements of a channel in each of k microbatches, as torch.nn.BatchNorm for the batch:

        mean      = sum(mean_i) / k
        variance  = (sum((n - 1) variance_i) + n sum((mean_i - mean)^2)) / (n k - 1)
        running   = (1 - momentum) running + momentum statistic
    """
    new: dict[str, torch.Tensor] = {}
    for norm in program.tracked:
        if norm.mean not in before:
            continue
        momentum: float | torch.Tensor | None = norm.momentum
        if norm.count is not None:
            # every microbatch has added one to the count of before, so any of them has the new one
            new[norm.count] = microbatches[-1][norm.count]
            momentum = 1.0 / new[norm.count].double() if momentum is None else momentum
        assert momentum is not None
        (elements,) = _torch.sizes_at([norm.elements], sizes)
        statistics = _joined(norm, microbatches, elements)
        for name, value in zip((norm.mean, norm.variance), statistics, strict=True):
            running = before[name].double()
            new[name] = ((1.0 - momentum) * running + momentum * value).to(before[name].dtype)
    return new


def _joined(
    norm: Tracked, microbatches: Sequence[Named], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and unbiased variance of all microbatches, in float64, each of so many elements."""
    means = torch.stack([microbatch[norm.mean].double() for microbatch in microbatches])
    variances = torch.stack([microbatch[norm.variance].double() for microbatch in microbatches])
    mean = means.mean(0)
    squares = (count - 1) * variances.sum(0) + count * (means - mean).square().sum(0)
    return mean, squares / (count * len(microbatches) - 1)
