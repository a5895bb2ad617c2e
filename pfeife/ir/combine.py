"""How the microbatches of a step come together: sums and means in index order, and what
batch norms track."""

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pfeife import _torch
from pfeife.ir.microbatch import Counted, count_of, named_batch
from pfeife.ir.parts import Count, Port, ProgramBase, Role, Tracked

Divisor = int | torch.Tensor  # a scalar in float64, or a number
Named = Mapping[str, torch.Tensor]


def loss_divisors(program: ProgramBase, microbatches: Sequence[Any]) -> list[Divisor]:
    """What every microbatch's loss is divided by before the losses are added: see `divisors`."""
    ports = program.ports(Role.LOSS)
    if not ports:
        return [1] * len(microbatches)
    return divisors(program, ports[0], microbatches, program.replicas)


def divisors(
    program: ProgramBase, port: Port, microbatches: Sequence[Any], pipelines: int = 1
) -> list[Divisor]:
    """What every microbatch of a result is divided by before they are added: 1 for a sum, their
    number for a mean, and their mean count over its own count for a weighted mean.

    `microbatches` are those of all pipelines, of which each has its own mean; the means are
    averaged. Raises ValueError for a mean over nothing.
    """
    if port.reduction == "sum" or len(microbatches) == 1:
        return [1] * len(microbatches)
    weighted = port.reduction == "weighted"
    #     loss of the batch   (a + b) / N, N = n + m                      as one device computes it
    #     mean of means       (a / n + b / m) / 2                         right where n = m alone
    #     here                (a / n) / (N / n) + (b / m) / (N / m)       each by its own divisor
    for index in port.counts:
        count = program.counts[index]
        counts = _counts(program, count, microbatches)
        _refuse_nothing(count, counts, empty_is_zero=weighted and count.empty_is_zero)
        # The mean of the batch is sum(loss[k] * count[k]) / sum(count). With several pipelines the
        # sums of each are averaged later, which divides by their number once more.
        if weighted and not _even(counts):
            total = add(counts)
            return [total / pipelines / number for number in counts]
        if not weighted:
            _warn_uneven(count, counts)
    return [len(microbatches) // pipelines] * len(microbatches)


def _counts(program: ProgramBase, count: Count, microbatches: Sequence[Any]) -> list[torch.Tensor]:
    return [
        microbatch.counts[program.counts.index(count)]
        if isinstance(microbatch, Counted)
        else count_of(count, named_batch(program, microbatch, index))
        for index, microbatch in enumerate(microbatches)
    ]


def _even(counts: Sequence[torch.Tensor]) -> bool:
    """Whether all counts are known to be the same: a plain mean, which costs less. Other devices
    than the CPU would have to be waited for."""
    return all(
        number.device.type == "cpu" and float(number) == float(counts[0]) for number in counts
    )


def _refuse_nothing(count: Count, counts: Sequence[torch.Tensor], *, empty_is_zero: bool) -> None:
    """Looks at the CPU's counts alone."""
    empty = [i for i, number in enumerate(counts) if number.device.type == "cpu" and not number]
    if empty and not (empty_is_zero and len(empty) < len(counts)):
        raise ValueError(
            f"microbatch {empty[0]} has nothing to take the mean of (every target is ignored, or "
            f"the mask is empty): {count.line}; leave such rows out, or take fewer microbatches"
        )


def _warn_uneven(count: Count, counts: Sequence[torch.Tensor]) -> None:
    sizes = [float(number) for number in counts]
    if len(set(sizes)) > 1:
        warnings.warn(
            f"the microbatches count {sizes} in {count.line}, but the loss has other terms too: "
            "the mean of the microbatches' means is not the mean of the batch; divide sums by "
            'counts that the step is given, and pass loss_reduction="sum"',
            stacklevel=2,
        )


def loss_tangents(
    program: ProgramBase, divided: Sequence[Divisor], scale: float = 1.0
) -> list[dict[str, torch.Tensor]]:
    """For every microbatch, by port name, the gradient that `(loss / divisor * scale).backward()`
    sends into the loss."""
    ports = [port for port in program.ports(Role.TANGENT) if port.fqn == "loss"]
    tangents_of: dict[Any, dict[str, torch.Tensor]] = {}
    for by in divided if ports else ():
        # Equal numbers share a tangent. A tensor is a key by its identity: no device is waited for.
        if by not in tangents_of:
            ones = torch.ones(ports[0].shape, dtype=ports[0].dtype, device=ports[0].device)
            tangents_of[by] = {ports[0].name: over(ones * scale, by)}
    return [tangents_of[by] if ports else {} for by in divided]


def over(value: torch.Tensor, divisor: Divisor) -> torch.Tensor:
    """A microbatch's part of a result; nothing where it counts for nothing."""
    if isinstance(divisor, int):
        return value / divisor
    by = divisor.to(value.device)
    # a count of 0 makes the divisor infinite, and its loss may be nan
    return torch.where(by.isinf(), 0, value.double() / by).to(value.dtype)


def combined(values: Sequence[torch.Tensor], divided: Sequence[Divisor]) -> torch.Tensor:
    """Each divided by its divisor, then added in index order."""
    return add([over(value, by) for value, by in zip(values, divided, strict=True)])


def add(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum, added in order."""
    return functools.reduce(torch.add, values)


def mean(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Added in order, then divided by their number."""
    return add(values) / len(values)


def tracked_names(program: ProgramBase) -> frozenset[str]:
    """The buffers that a step updates once, from what each of its microbatches has found."""
    names = (name for norm in program.tracked for name in (norm.mean, norm.variance, norm.count))
    return frozenset(name for name in names if name is not None)


def tracked(
    program: ProgramBase,
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
    # The sum of squares about the common mean: those about each own mean, which the unbiased
    # variances have, and what the means themselves are apart.
    squares = (count - 1) * variances.sum(0) + count * (means - mean).square().sum(0)
    return mean, squares / (count * len(microbatches) - 1)
