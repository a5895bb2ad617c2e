"""Ranks whose machines differ: what clusters take on each of them, and how much memory there is."""

from collections.abc import Sequence
from typing import Any

import attrs

from pfeife.cost import estimate
from pfeife.data.machine import Machine
from pfeife.ir.program import Program
from pfeife.sched.cutting.workload import Seconds, Workload


def machines_of(given: Machine | Sequence[Machine], ranks: int) -> tuple[Machine, ...]:
    """The machine of every rank. Raises ValueError unless there is one, or one a rank."""
    if isinstance(given, Machine):
        return (given,) * ranks
    found = tuple(given)
    if len(found) != ranks or not all(isinstance(one, Machine) for one in found):
        raise ValueError(
            f"machine: {len(found)} machines for {ranks} ranks of a pipeline; give one for all of "
            "them, or one for each"
        )
    return found


def limits_of(machines: Sequence[Machine], given: int | None) -> tuple[int, ...]:
    """Bytes that every rank may use: its machine's, or at most what was given for all."""
    return tuple(one.memory if given is None else given for one in machines)


def on_machines(work: Workload, program: Program, machines: Sequence[Machine]) -> Workload:
    """A program's workload with the seconds on ranks whose machine is another one than the first,
    which the program's costs are of: these times what an estimate has for the one by the other."""
    first, elsewhere = machines[0], {}
    known: list[tuple[Machine, Seconds]] = []
    for rank, machine in enumerate(machines):
        if machine == first:
            continue
        seconds = next((found for one, found in known if one == machine), None)
        if seconds is None:
            seconds = _seconds(program, first, machine)
            known.append((machine, seconds))
        elsewhere[rank] = seconds
    return attrs.evolve(work, elsewhere=elsewhere) if elsewhere else work


def _seconds(program: Program, first: Machine, other: Machine) -> Seconds:
    here, there = estimate(program, first), estimate(program, other)
    found: dict[Any, list[float]] = {}
    for call in program.calls:
        mine = found.setdefault(call.kind, [0.0] * program.units)
        pairs = (
            (call.seconds or 0.0, here.seconds, there.seconds),
            (call.accumulate_seconds, here.accumulate, there.accumulate),
        )
        for seconds, before, after in pairs:
            known = before.get(call.node, 0.0)
            mine[call.unit] += seconds * after.get(call.node, 0.0) / known if known else seconds
    return {kind: tuple(each) for kind, each in found.items()}
