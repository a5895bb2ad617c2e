"""The gradients of a step's results that arrive on every rank, with the loss outside of it."""

from collections.abc import Mapping, Sequence

import torch

Tangents = Sequence[Mapping[str, torch.Tensor]]  # a microbatch each, by the names of ports
# How far kernels of other ranks may be off, as a share of the sum of sizes; others: a fiftieth.
_NEAR = {torch.float64: 1e-9, torch.float32: 1e-5}


def sketch(tangents: Tangents) -> torch.Tensor:
    """Two numbers in float64 for every gradient: the sum of its sizes, and a sum with weights
    that are other ones for all neighbours, so that hardly a change leaves it as it is."""
    gradients = [gradient for part in tangents for gradient in part.values()]
    return torch.stack([number for gradient in gradients for number in _of(gradient)])


def _of(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    wide = real.detach() if real.dtype in _NEAR else real.detach().float()
    table = wide.reshape(-1, wide.shape[-1] if wide.dim() else 1)
    rows, columns = (_weights(size, table) for size in table.shape)
    return table.abs().sum(dtype=torch.float64), rows.double() @ (table @ columns).double()


def _weights(count: int, like: torch.Tensor) -> torch.Tensor:
    """Numbers from 0.5 to 1.5, spread evenly and in no order: multiples of the golden ratio."""
    places = torch.arange(count, dtype=torch.float64, device=like.device)
    return (places * 0.6180339887498949).frac().add(0.5).to(like.dtype)


def compared(sketches: Sequence[torch.Tensor], tangents: Tangents) -> str:
    """What is wrong with the ranks' sketches, "" if they agree to within rounding."""
    gradients = [(name, gradient) for part in tangents for name, gradient in part.items()]
    first = sketches[0].tolist()
    for rank, rank_sketch in enumerate(sketches[1:], 1):
        second = rank_sketch.tolist()
        for index, (name, gradient) in enumerate(gradients):
            at = slice(2 * index, 2 * index + 2)
            left, right = torch.tensor(first[at]), torch.tensor(second[at])
            near = _NEAR.get(gradient.dtype, 0.02)
            most = max(first[at.start], second[at.start])
            if not torch.allclose(left, right, 0.0, near * most, equal_nan=True):
                return (
                    f"the gradient of {name.removeprefix('tangent_')} is another one on rank "
                    f"{rank} than on rank 0: each rank has computed its own loss of the step's "
                    "results. Give every rank the same targets and options, or compute the loss "
                    "inside of the step (compare_batches=False leaves this check out)"
                )
    return ""
