"""oneDNN's recurrent layers, as their backward wants them."""

import torch
from torch import Tensor


@torch.library.custom_op("pfeife::recurrent_layer", mutates_args=())
def recurrent_layer(
    input: Tensor,
    weight0: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    weight3: Tensor,
    hx: Tensor,
    cx: Tensor,
    reverse: bool,
    batch_sizes: list[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`aten.mkldnn_rnn_layer`, whose last result is what the backward needs. Its kernel leaves that
    out where no gradients are recorded, as where a captured graph runs, which has the backward in
    it; so it is told here that they are."""
    weights = (weight0, weight1, weight2, weight3)
    modes = (mode, hidden_size, num_layers, has_biases, bidirectional, batch_first, train)
    operation = torch.ops.aten.mkldnn_rnn_layer.default
    with torch.enable_grad():
        found: tuple[Tensor, Tensor, Tensor, Tensor] = operation(
            input.detach(), *weights, hx, cx, reverse, batch_sizes, *modes
        )
    return found


@recurrent_layer.register_fake
def _(*args: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.aten.mkldnn_rnn_layer.default(*args)
    return found


TRAINING = {torch.ops.aten.mkldnn_rnn_layer.default: torch.ops.pfeife.recurrent_layer.default}
