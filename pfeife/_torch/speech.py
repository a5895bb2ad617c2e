"""Connectionist temporal classification: what torch's own rules for tensors without storage lack.

forward     losses [rows], alphas [rows, times, places]      places = 2 * longest target + 1
backward    reads the alphas, whose last size only data tell
"""

from typing import Any

import torch

# torch knows how these compute, and nothing of their shapes where lengths are tensors. The library
# lives as long as the process.
_LIBRARY = torch.library.Library("aten", "IMPL")


def _forward(log_probs: Any, targets: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = log_probs.shape[1] if log_probs.dim() == 3 else 1
    places = torch.library.get_ctx().new_dynamic_size(min=1)
    alphas = log_probs.new_empty(rows, log_probs.shape[0], places)
    return log_probs.new_empty(rows), alphas


def _backward(grad: Any, log_probs: Any, *_: Any) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _has_rule(name: str) -> bool:
    """Whether an operator runs without storage: by a rule, or by other operators."""
    keys = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


for _name, _rule in (
    ("aten::_ctc_loss.Tensor", _forward),
    ("aten::_ctc_loss_backward.Tensor", _backward),
    ("aten::_ctc_loss_backward", _backward),
):
    if not _has_rule(_name):  # a torch with rules of its own is left alone
        torch.library.register_fake(_name, _rule, lib=_LIBRARY)
