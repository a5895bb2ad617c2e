"""Writes costs onto the calls of a program."""

from collections.abc import Callable

import attrs

from pfeife.data.plan import Costs
from pfeife.ir.program import Program


def annotate(costs: Costs) -> Callable[[Program], Program]:
    """A pass that gives every call its costs, by the names of the calls' nodes.

    `costs` are what `cost.estimate` or `cost.measure` found for a program with the same calls:
    seconds of one microbatch, and of adding its gradients to those of the ones before, and bytes
    that operations need inside of themselves. Raises ValueError if a call has no cost.
    """

    def run(program: Program) -> Program:
        missing = [call.node for call in program.calls if call.node not in costs.seconds]
        if missing:
            raise ValueError(f"the costs ({costs.source}) know nothing of {missing}")
        calls = tuple(
            attrs.evolve(
                call,
                seconds=costs.seconds[call.node],
                accumulate_seconds=costs.accumulate.get(call.node, 0.0),
                inside_bytes=costs.inside.get(call.node, 0),
            )
            for call in program.calls
        )
        return attrs.evolve(program, calls=calls)

    return run
