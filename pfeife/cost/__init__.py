"""What things cost: seconds and bytes, estimated or measured, as plain data.

`machine` has the profiles, `estimate` a roofline over them, `measure` runs every distinct body;
read these first. `precision` says which dtypes a profile lacks, `network` measures links, `memory`
counts a schedule's bytes by running the interpreter over what `sized` has, `body` looks into one
body, `cache` keeps what was measured.
"""

from pfeife.cost.body import StageMemory, stage_memory
from pfeife.cost.estimate import estimate, member_prices, timing_of
from pfeife.cost.machine import default_machine, machine, machines
from pfeife.cost.measure import measure
from pfeife.cost.memory import memory_curves
from pfeife.cost.precision import AssumedRate, assumed_rates
from pfeife.ir.flops import flops_of

__all__ = [
    "AssumedRate",
    "StageMemory",
    "assumed_rates",
    "default_machine",
    "estimate",
    "flops_of",
    "machine",
    "machines",
    "measure",
    "member_prices",
    "memory_curves",
    "stage_memory",
    "timing_of",
]
