"""The gradients of a step's results that arrive on every rank, with the loss outside of it."""

from collections.abc import Iterable, Mapping, Sequence

import torch

_LOOKED_AT = 64  # values of a gradient
_NEAR = {torch.float64: 1e-6, torch.float32: 1e-3}  # as a share of the largest; others: a tenth


def sketch(tangents: Iterable[Mapping[str, torch.Tensor]]) -> str:
    """Some values of every gradient and the sum of its sizes, a line each."""
    return "\n".join(_line(name, one) for part in tangents for name, one in part.items())


def _line(name: str, gradient: torch.Tensor) -> str:
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    flat = real.detach().reshape(-1)
    few = flat[:: max(1, flat.numel() // _LOOKED_AT)].double()
    values = torch.cat([flat.abs().sum(dtype=torch.float64).reshape(1), few])
    near = _NEAR.get(flat.dtype, 0.1)
    return " ".join([name.removeprefix("tangent_"), str(near), *map(str, values.tolist())])


def compared(sketches: Sequence[str]) -> str:
    """What is wrong with the ranks' sketches, "" if they agree to within rounding."""
    for rank, other in enumerate(sketches):
        for mine, theirs in zip(sketches[0].splitlines(), other.splitlines(), strict=True):
            name, near, *first = mine.split()
            one, two = (torch.tensor([*map(float, v)]) for v in (first, theirs.split()[2:]))
            most = float(one[1:].abs().nan_to_num().max()) if len(one) > 1 else 0.0
            if not torch.allclose(one, two, float(near), float(near) * most, equal_nan=True):
                return (
                    f"the gradient of {name} is another one on rank {rank} than on rank 0: each "
                    "rank has computed its own loss of the step's results. Give every rank the "
                    "same targets and options, or compute the loss inside of the step "
                    "(compare_batches=False leaves this check out)"
                )
    return ""
