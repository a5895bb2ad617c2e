"""Statistics of batch norms over all microbatches of a step: how they are put together, once."""

from collections.abc import Mapping, Sequence

import torch

from pfeife import _torch
from pfeife.ir.parts import Tracked
from pfeife.ir.program import Program

Named = Mapping[str, torch.Tensor]


def tracked_names(program: Program) -> frozenset[str]:
    """The buffers that a step updates once, from what each of its microbatches has found."""
    names = (name for one in program.tracked for name in (one.mean, one.variance, one.count))
    return frozenset(name for name in names if name is not None)


def tracked(
    program: Program,
    before: Named,
    found: Sequence[Mapping[str, torch.Tensor]],
    sizes: Mapping[str, int],
) -> dict[str, torch.Tensor]:
    """The new values of such buffers, of those that are given from `before` the step; `found` has
    for every microbatch its mean and unbiased variance, and the new count; `sizes` are the values
    of the size ports.

    With n elements of a channel in each of k microbatches, as torch.nn.BatchNorm for the batch:

        mean      = sum(mean_i) / k
        variance  = (sum((n - 1) variance_i) + n sum((mean_i - mean)^2)) / (n k - 1)
        running   = (1 - momentum) running + momentum statistic
    """
    new: dict[str, torch.Tensor] = {}
    for one in program.tracked:
        if one.mean not in before:
            continue
        momentum: float | torch.Tensor | None = one.momentum
        if one.count is not None:
            new[one.count] = found[-1][one.count]
            momentum = 1.0 / new[one.count].double() if momentum is None else momentum
        assert momentum is not None
        (elements,) = _torch.sizes_at([one.elements], sizes)
        statistics = _joined(one, found, elements)
        for name, value in zip((one.mean, one.variance), statistics, strict=True):
            running = before[name].double()
            new[name] = ((1.0 - momentum) * running + momentum * value).to(before[name].dtype)
    return new


def _joined(one: Tracked, found: Sequence[Named], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and unbiased variance of all microbatches, in float64, each of so many elements."""
    means = torch.stack([each[one.mean].double() for each in found])
    variances = torch.stack([each[one.variance].double() for each in found])
    mean = means.mean(0)
    squares = (count - 1) * variances.sum(0) + count * (means - mean).square().sum(0)
    return mean, squares / (count * len(found) - 1)
