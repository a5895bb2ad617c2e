"""Ranks whose machines differ: what clusters take on each of them, and how much memory there is."""

from collections.abc import Sequence
from typing import Any

import attrs

from pfeife.cost import estimate
from pfeife.data.machine import Machine
from pfeife.ir.program import Program
from pfeife.sched.cutting.workload import Seconds, Workload


def machines_of(machine: Machine | Sequence[Machine], ranks: int) -> tuple[Machine, ...]:
    """The machine of every rank. Raises ValueError unless there is one, or one a rank."""
    if isinstance(machine, Machine):
        return (machine,) * ranks
    machines = tuple(machine)
    if len(machines) != ranks or not all(isinstance(member, Machine) for member in machines):
        raise ValueError(
            f"machine: {len(machines)} machines for {ranks} ranks of a pipeline; give one for all "
            "of them, or one for each"
        )
    return machines


def limits_of(machines: Sequence[Machine], memory_limit: int | None) -> tuple[int, ...]:
    """Bytes that every rank may use: its machine's, or at most what was given for all."""
    return tuple(machine.memory if memory_limit is None else memory_limit for machine in machines)


# Costs are those of the first machine, perhaps measured there; nobody can measure another one here.
#
#     rank                     0          1                                2
#     machine                  A          B                                A
#     seconds of a call     s (of A)   s x estimate on B / estimate on A   s
#
# So what an estimate leaves out grows with the rest, and a rank with the first machine has no row.
def on_machines(work: Workload, program: Program, machines: Sequence[Machine]) -> Workload:
    """A program's workload with the seconds on ranks whose machine is another one than the first,
    which the program's costs are of: these times what an estimate has for the one by the other."""
    first, kinds = machines[0], list[Machine]()  # machines are not to be hashed
    for machine in machines:
        kinds += [machine] if machine not in kinds else []
    seconds = [_seconds(program, first, machine) for machine in kinds[1:]]
    ranks = enumerate(map(kinds.index, machines))
    elsewhere = {rank: seconds[kind - 1] for rank, kind in ranks if kind}
    return attrs.evolve(work, elsewhere=elsewhere) if elsewhere else work


def _seconds(program: Program, first: Machine, second: Machine) -> Seconds:
    here, there = estimate(program, first), estimate(program, second)
    seconds_of: dict[Any, list[float]] = {}
    for call in program.calls:
        row = seconds_of.setdefault(call.kind, [0.0] * program.units)
        pairs = (
            (call.seconds or 0.0, here.seconds, there.seconds),
            (call.accumulate_seconds, here.accumulate, there.accumulate),
        )
        for seconds, before, after in pairs:
            # What has no estimate takes as long on every machine.
            estimated = before.get(call.node, 0.0)
            row[call.unit] += (
                seconds * after.get(call.node, 0.0) / estimated if estimated else seconds
            )
    return {kind: tuple(row) for kind, row in seconds_of.items()}
