"""Workloads in bare numbers."""

from collections.abc import Sequence

from pfeife.cost.body import Storage
from pfeife.ir.parts import Kind
from pfeife.sched.cutting.workload import Flow, Workload


def chained(
    seconds: Sequence[float],
    parameters: Sequence[int],
    saved: Sequence[int],
    crossing: Sequence[int],
    blocked: frozenset[int] = frozenset(),
) -> Workload:
    """Clusters that save for their own backward and send to the next one."""
    count = len(seconds)
    flows = [(saved[c], c, (c, Kind.BACKWARD)) for c in range(count)]
    flows += [(crossing[c], c - 1, (c, Kind.FORWARD)) for c in range(1, count)]
    return Workload(
        {Kind.FORWARD: tuple(seconds), Kind.BACKWARD: (0.0,) * count},
        tuple((size, frozenset({c})) for c, size in enumerate(parameters)),
        tuple(parameters),
        tuple(
            Flow(size, unit, Kind.FORWARD, (reader,), Storage(f"F{unit}", str(reader), size))
            for size, unit, reader in flows
        ),
        {Kind.FORWARD: (0,) * count, Kind.BACKWARD: tuple(parameters)},
        {Kind.FORWARD: (1,) * count, Kind.BACKWARD: (0,) * count},
        blocked,
    )
