"""What a microbatch of a program has: rows, and tokens."""

import math

import torch

from pfeife.ir.parts import Port, Role
from pfeife.ir.program import Program


def rows_and_tokens(program: Program) -> tuple[int, int]:
    """The rows of a microbatch, and the elements of its first tensor of integers that has rows and
    further dimensions; 0 where there are none."""
    cut = [port for port in program.ports(Role.BATCH) if port.batch_dim is not None]
    rows = min((port.shape[port.batch_dim or 0] for port in cut), default=0)
    return rows, next((math.prod(port.shape) for port in cut if _has_tokens(port)), 0)


def _has_tokens(port: Port) -> bool:
    whole = not port.dtype.is_floating_point and port.dtype != torch.bool
    return whole and len(port.shape) > 1
