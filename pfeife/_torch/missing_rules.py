"""Rules that torch lacks for some operations: how recurrent layers compute as in eager where they
are traced, the shapes of connectionist temporal classification, FLOPs.

recurrent   nn.LSTM, nn.GRU, nn.RNN
classification
  forward   losses [rows], alphas [rows, times, places]      places = 2 * longest target + 1
  backward  reads the alphas, whose last size only data tell
grouped     [rows, k] x [groups, k, n], as experts have them: each row with its group's matrix
"""

from collections.abc import Sequence
from typing import Any

import torch

_LAYER = torch.ops.aten.mkldnn_rnn_layer
_FORM = str(_LAYER.default._schema).removeprefix("aten::mkldnn_rnn_layer")

# The libraries live as long as the process.
_OPERATIONS = torch.library.Library("pfeife", "FRAGMENT")
_RULES = torch.library.Library("aten", "IMPL")
# An LSTM layer on the CPU asks whether gradients are recorded, and only then makes what a backward
# reads. Captured operations run without that.
_OPERATIONS.define(f"mkldnn_rnn_layer{_FORM}")
_OURS = torch.ops.pfeife.mkldnn_rnn_layer


def _layer(*args: Any) -> Any:
    with torch.enable_grad():
        return _LAYER(*args)


_OPERATIONS.impl("mkldnn_rnn_layer", _layer, "CPU")
torch.library.register_fake("pfeife::mkldnn_rnn_layer", _LAYER, lib=_OPERATIONS)


def as_captured(operation: Any, args: Sequence[Any]) -> Any:
    """What computes an operation of a joint graph, as it was traced, where no gradients are
    recorded."""
    return _OURS.default if operation is _LAYER.default and args[-1] else operation


def _classified(log_probs: Any, targets: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = log_probs.shape[1] if log_probs.dim() == 3 else 1
    places = torch.library.get_ctx().new_dynamic_size(min=1)
    alphas = log_probs.new_empty(rows, log_probs.shape[0], places)
    return log_probs.new_empty(rows), alphas


def _classified_backward(grad: Any, log_probs: Any, *_: Any) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _has_rule(name: str) -> bool:
    """Whether an operator runs without storage: by a rule, or by other operators."""
    keys = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


# torch knows how these compute, and nothing of their shapes where lengths are tensors.
for _name, _rule in (
    ("aten::_ctc_loss.Tensor", _classified),
    ("aten::_ctc_loss_backward.Tensor", _classified_backward),
    ("aten::_ctc_loss_backward", _classified_backward),
):
    if not _has_rule(_name):  # a torch with rules of its own is left alone
        torch.library.register_fake(_name, _rule, lib=_RULES)


def _layer_flops(inputs: Any, weight: Any, hidden_weight: Any, *_: Any, **__: Any) -> int:
    """Of one layer in all of its places: the products with the input's and the state's weights."""
    return int(2 * inputs.numel() // inputs.shape[-1] * (weight.numel() + hidden_weight.numel()))


def _grouped_flops(first: Any, second: Any, *_: Any, **__: Any) -> int:
    """Two for each number of a row and each column of its group's matrix, whatever groups the rows
    are in: [rows, k] x [groups, k, n], [k, rows] x [rows, n], or with columns in groups,
    [groups, m, k] x [k, columns]."""
    if first.dim() == 3 and second.dim() == 2:
        return int(2 * first.shape[1] * second.numel())
    return int(2 * first.numel() * second.shape[-1])


def flops() -> dict[Any, Any]:
    """FLOPs by operation: of torch's own, and of those by which transformers, where it is imported,
    computes groups in other types than bfloat16. A backward has twice as many as its forward, for
    the gradients of both factors."""
    aten, transformers = torch.ops.aten, torch.ops.transformers
    by_operation: dict[Any, Any] = {
        _OURS: _layer_flops,
        aten.mkldnn_rnn_layer_backward: lambda *args, **_: 2 * _layer_flops(*args),
        aten._grouped_mm: _grouped_flops,
        aten._scaled_grouped_mm: _grouped_flops,
    }
    fallbacks = {
        "grouped_mm_fallback": _grouped_flops,
        "grouped_mm_fallback_backward": lambda *args, **_: 2 * _grouped_flops(*args),
    }
    # Version 5.17 of transformers has the first one alone.
    return by_operation | {
        getattr(transformers, n): f for n, f in fallbacks.items() if hasattr(transformers, n)
    }
