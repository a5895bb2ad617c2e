"""Recurrent layers: nn.LSTM, nn.GRU and nn.RNN, traced into operations that compute as eager."""

from collections.abc import Sequence
from typing import Any

import torch

_ATEN = torch.ops.aten.mkldnn_rnn_layer
_FORM = str(_ATEN.default._schema).removeprefix("aten::mkldnn_rnn_layer")

# An LSTM layer on the CPU asks whether gradients are recorded, and only then makes what a backward
# reads. Captured operations run without that. The library lives as long as the process.
_LIBRARY = torch.library.Library("pfeife", "FRAGMENT")
_LIBRARY.define(f"mkldnn_rnn_layer{_FORM}")
_OURS = torch.ops.pfeife.mkldnn_rnn_layer


def _layer(*args: Any) -> Any:
    with torch.enable_grad():
        return _ATEN(*args)


_LIBRARY.impl("mkldnn_rnn_layer", _layer, "CPU")
torch.library.register_fake("pfeife::mkldnn_rnn_layer", _ATEN, lib=_LIBRARY)


def as_captured(operation: Any, args: Sequence[Any]) -> Any:
    """What computes an operation of a joint graph, as it was traced, where no gradients are
    recorded."""
    return _OURS.default if operation is _ATEN.default and args[-1] else operation


def layer_flops(inputs: Any, weight: Any, hidden_weight: Any, *_: Any, **__: Any) -> int:
    """Of one layer in all of its places: the products with the input's and the state's weights."""
    return int(2 * inputs.numel() // inputs.shape[-1] * (weight.numel() + hidden_weight.numel()))


def layer_backward_flops(*args: Any, **kwargs: Any) -> int:
    """Twice as many, for the gradients of both factors."""
    return 2 * layer_flops(*args)


FLOPS = {
    _OURS: layer_flops,
    torch.ops.aten.mkldnn_rnn_layer_backward: layer_backward_flops,
}
