"""Precision that a machine lacks: which rate an estimate takes instead."""

import attrs
import torch

from pfeife.data.machine import Machine
from pfeife.ir.flops import flops_of
from pfeife.ir.program import Program

_WIDE = frozenset(("float32", "float64"))


@attrs.frozen
class AssumedRate:
    """A dtype of which the profile of a `machine` tells no rate, and the `rate` (operations per
    second) that estimates take for it; `share` of a program's operations are in this dtype, from 0
    to 1."""

    machine: str
    dtype: str
    share: float
    rate: float

    def __str__(self) -> str:
        return (
            f"machine {self.machine} has no rate for {self.dtype}, in which {self.share:.0%} of "
            f"the operations are: its hardware has none, or nobody has measured it; estimates take "
            f"float32's, {self.rate / 1e12:g} TFLOP/s"
        )


def assumed_rates(program: Program, machine: Machine) -> tuple[AssumedRate, ...]:
    """The dtypes that a program computes in and of which a machine's profile tells no rate, most
    operations first.

    A profile without any rate of a narrower dtype than float32 tells nothing of these, and is taken
    as it is: `cpu-core`, or figures by hand.

    >>> net = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    >>> flat = pfeife.capture(lambda x: net(x).sum(), torch.ones(2, 4, dtype=torch.bfloat16))
    >>> (assumed,) = cost.assumed_rates(pfeife.fuse()(flat), machine("v100-sxm2-32gb"))
    >>> assumed.dtype, assumed.rate
    ('bfloat16', 14000000000000.0)
    """
    # Who has given no rate of half precision at all has not thought of it, or has no such units.
    if set(machine.flops) <= _WIDE:
        return ()
    flops = flops_of(program)
    total = sum(flops.values())
    names = {_name(dtype): count for dtype, count in flops.items()}
    # An estimate takes float32's rate for these: see `Machine.flops_of`.
    lacking = sorted(set(names) - set(machine.flops), key=names.__getitem__, reverse=True)
    rate = machine.flops["float32"]
    return tuple(AssumedRate(machine.name, name, names[name] / total, rate) for name in lacking)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
