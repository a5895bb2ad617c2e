"""Gradients that a narrow type loses: in float16 nothing is smaller than 6e-8."""

import torch

from pfeife.ir.nodes import value_of
from pfeife.ir.parts import Kind
from pfeife.ir.program import Program


def underflows(program: Program) -> bool:
    """Whether backwards compute in a type without the range of float32, which bfloat16 has: then a
    step may run again, with another gradient of its loss."""
    bodies = [program.body(call) for call in program.calls if call.kind != Kind.FORWARD]
    values = (value_of(node) for body in bodies for node in body.graph.nodes)
    dtypes = {value.dtype for value in values if value is not None and value.is_floating_point()}
    return any(torch.finfo(d).tiny > torch.finfo(torch.float32).tiny for d in dtypes)
