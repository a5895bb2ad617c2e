"""Machines to plan for."""

import os

import attrs
import torch

from pfeife.plan import Machine

# A CPU core with 256-bit FMA at about 3 GHz sustains about 50 GFLOP/s in float32 matrix products;
# these rates only have to be in proportion, since `measure` replaces them where it matters.
CPU_CORE = Machine(
    name="cpu core",
    flops=5e10,
    memory_bandwidth=1e10,
    memory=4 * 2**30,
    link_bandwidth=2e9,
    link_latency=6e-5,
    launch_seconds=5e-6,
)
# NVIDIA H100 SXM data sheet: 989 TFLOP/s dense bf16, 3.35 TB/s, 80 GB, NVLink 450 GB/s a direction;
# sustained rates taken as 60 % of the peaks.
H100 = Machine(
    name="h100 sxm",
    flops=5.9e14,
    memory_bandwidth=2.0e12,
    memory=80 * 10**9,
    link_bandwidth=2.7e11,
    link_latency=1e-5,
    launch_seconds=5e-6,
)


def default_machine(device: torch.device) -> Machine:
    """A guess at the machine that a device belongs to, good enough to balance stages."""
    if device.type == "cpu":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return attrs.evolve(CPU_CORE, memory=pages)
    return H100
