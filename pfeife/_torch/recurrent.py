"""Recurrent layers: nn.LSTM, nn.GRU and nn.RNN, traced into operations that compute as eager."""

import contextlib
from collections.abc import Iterator, Sequence
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


def _mkldnn(
    given: torch.Tensor,
    hidden: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    biases: bool,
    reverse: bool = False,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """One layer in one direction; its last argument is whether gradients are recorded."""
    weight, hidden_weight, *both = parameters
    if not biases:
        both = [weight.new_zeros(len(weight)), weight.new_zeros(len(weight))]
    state, cell = (one.unsqueeze(0).contiguous() for one in hidden)
    lstm, layers, size = 2, 1, state.shape[2]
    found, *ends = _ATEN(
        given.contiguous(),
        *(weight, hidden_weight, *both, state, cell),
        *(reverse, [], lstm, size, layers, biases, False, False, torch.is_grad_enabled()),
    )
    return found, (ends[0].squeeze(0), ends[1].squeeze(0))


@contextlib.contextmanager
def recurrent_as_eager() -> Iterator[None]:
    """While tracing recurrent layers are taken apart as eager computes them.

    torch's decomposition leaves out the dropout between layers (2.11 to 2.15: it compares the
    number of layers the wrong way round), so it is given one layer at a time; and on the CPU it
    takes MKLDNN's kernel for the first layer of an LSTM alone, eager for every layer. If these
    functions move: leave this out.
    """
    from torch._decomp import decompositions

    helper, select = decompositions._rnn_helper, decompositions.select_one_layer_lstm_function
    mkldnn = decompositions.mkldnn_one_layer_lstm

    def layers(
        given: torch.Tensor,
        hidden: Sequence[Any],
        parameters: Sequence[Any],
        biases: bool,
        count: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        *how: Any,
    ) -> tuple[torch.Tensor, list[Any]]:
        ends: list[Any] = []
        width = 2 if bidirectional else 1
        for layer in range(count):
            own = slice(width * layer, width * (layer + 1))
            both = hidden[own], parameters[own]
            given, end = helper(given, *both, biases, 1, 0.0, train, bidirectional, *how)
            ends += end
            if dropout and train and layer < count - 1:
                given = torch.dropout(given, dropout, train)
        return given, ends

    def selected(given: torch.Tensor, hidden: Sequence[Any], parameters: Sequence[Any]) -> Any:
        plain = select(given.detach(), hidden, parameters)  # it refuses what needs a gradient
        return _mkldnn if plain is mkldnn else plain

    decompositions._rnn_helper = layers
    decompositions.select_one_layer_lstm_function = selected
    try:
        yield
    finally:
        decompositions._rnn_helper = helper
        decompositions.select_one_layer_lstm_function = select


def layer_flops(given: Any, weight: Any, hidden_weight: Any, *_: Any, **__: Any) -> int:
    """Of one layer in all of its places: the products with the input's and the state's weights."""
    return int(2 * given.numel() // given.shape[-1] * (weight.numel() + hidden_weight.numel()))


def layer_backward_flops(*args: Any, **kwargs: Any) -> int:
    """Twice as many, for the gradients of both factors."""
    return 2 * layer_flops(*args)


FLOPS = {
    _OURS: layer_flops,
    torch.ops.aten.mkldnn_rnn_layer_backward: layer_backward_flops,
}
