"""A pass of one's own: messages between ranks in bfloat16, or in int8 with a scale.

Run `python examples/small_messages.py`: it prints what is sent and how far the gradients are off.
"""

import operator
import sys

import torch
import torch.nn.functional as F
from gpt import GPT

import pfeife
from pfeife.ir.program import receive, send
from pfeife.testing import check_pass

aten = torch.ops.aten
WITHIN = {"bfloat16": 0.03, "int8": 0.06}  # of the largest value of a gradient, on this net


def small_messages(dtype):
    """Floats are sent as `dtype`; with int8 each value goes with its scale, its largest over 127.

    A value is off by at most 2**-9 of itself in bfloat16, by half a scale in int8.
    """

    def narrow(make, value):
        if not value.meta["val"].dtype.is_floating_point or not value.meta["val"].dim():
            return [value]
        if dtype != torch.int8:
            return [make(aten._to_copy.default, value, dtype=dtype)]
        largest = make(aten.clamp_min.default, make(aten.amax.default, make(aten.abs.default, value)), 1e-30)
        scale = make(aten.div.Scalar, largest, 127)
        return [make(aten._to_copy.default, make(aten.round.default, make(aten.div.Tensor, value, scale)), dtype=dtype), scale]

    ...
