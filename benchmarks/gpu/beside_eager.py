"""Numbers beside those of eager accumulation on the same device."""

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from gpu.cases import Case
from gpu.rows import Wrong
from pfeife import Result

Values = Mapping[str, torch.Tensor]
SUMMED = "the tied weight's gradient is a sum over ranks, in another order than eager's"


@attrs.frozen
class Rounding:
    """By how much values may differ, of the largest one of their tensor, and why; `names` are those
    that may, all if there are none."""

    relative: float
    why: str
    names: tuple[str, ...] = ()

    def of(self, name: str) -> float:
        return self.relative if not self.names or name in self.names else 0.0


BITWISE = Rounding(0.0, "")


def deterministic() -> None:
    """From here on this process computes the same bits each time; a kernel that cannot raises."""
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG"), "set before CUDA starts"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def accumulated(case: Case, microbatches: Sequence[tuple[torch.Tensor, ...]]) -> Values:
    """Loss, gradients and updated buffers of `(loss / n).backward()` for each in order."""
    before = copy.deepcopy(case.model.state_dict())
    case.model.zero_grad(set_to_none=True)
    losses = []
    for microbatch in microbatches:
        loss = case.step(*microbatch)
        (loss / len(microbatches)).backward()
        losses.append(loss.detach() / len(microbatches))
    found = {"loss": sum(losses[1:], losses[0])}
    found |= {f"gradient of {n}": p.grad for n, p in case.model.named_parameters()}
    found |= {
        f"buffer {name}": value.clone()
        for name, value in case.model.named_buffers()
        if not torch.equal(value, before[name])
    }
    case.model.load_state_dict(before)
    case.model.zero_grad(set_to_none=True)
    return found


def values_of(result: Result) -> Values:
    """The same of a result."""
    found = {} if result.loss is None else {"loss": result.loss}
    found |= {f"gradient of {name}": value for name, value in result.gradients.items()}
    return found | {f"buffer {name}": value for name, value in result.buffers.items()}


def of_gradients(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"gradient of {name}" for name in names)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, of the largest value that is wanted; 0.0 for the same bits."""
    found, wanted = found.detach().to(wanted.device), wanted.detach()
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    if torch.equal(_bits(found), _bits(wanted)):
        return 0.0
    one, other = found.double(), wanted.double()
    worst = ((one - other).abs().max() / other.abs().max().clamp_min(1e-30)).item()
    return float("inf") if worst != worst else max(worst, 1e-30)


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def alike(
    found: Values, wanted: Values, rounding: Rounding = BITWISE, again: Values | None = None
) -> dict[str, Any]:
    """How many values were compared, and by how much they differ. Raises Wrong where that is more
    than may be; with `again`, what is wanted computed once more, eager's own differences are
    allowed, four times."""
    if found.keys() != wanted.keys():
        only = sorted(found.keys() ^ wanted.keys())[:4]
        raise Wrong(f"other values than eager's: {only}")
    errors = {name: error(found[name], wanted[name]) for name in wanted}
    own = {name: error(again[name], wanted[name]) if again else 0.0 for name in wanted}
    worst = max(errors, key=errors.__getitem__)
    figures: dict[str, Any] = {"compared": len(wanted), "bitwise": not any(errors.values())}
    if errors[worst]:
        figures |= {"largest difference": errors[worst], "of": worst}
        if rounding.why:
            figures["may round"] = f"{rounding.relative:g}: {rounding.why}"
    if any(own.values()):
        figures["eager's own difference"] = max(own.values())
    over = [n for n, e in errors.items() if e > max(4 * own[n], rounding.of(n))]
    if over:
        raise Wrong(f"{len(over)} of {len(wanted)} values differ, such as {over[0]}", **figures)
    return figures
