"""What things cost: seconds and bytes, estimated or measured, as plain data."""

from pfeife.cost.estimate import estimate
from pfeife.cost.machine import CPU_CORE, H100, default_machine
from pfeife.cost.measure import measure
from pfeife.cost.memory import StageMemory, stage_memory

__all__ = [
    "CPU_CORE",
    "H100",
    "StageMemory",
    "default_machine",
    "estimate",
    "measure",
    "stage_memory",
]
