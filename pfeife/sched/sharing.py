"""Which of the ways to share parameters among members is planned."""

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from pfeife.cost.estimate import timing_of
from pfeife.data.machine import Machine
from pfeife.data.plan import Plan
from pfeife.ir.digest import program_digest
from pfeife.ir.program import Program
from pfeife.lowering.lower import lower
from pfeife.lowering.predict import predict
from pfeife.passes.apply import apply
from pfeife.passes.overlap import overlap
from pfeife.sched.families.policies import gpipe

Way = TypeVar("Way")
Planned = TypeVar("Planned")


def preferred(
    ways: Sequence[Program], machine: Machine, microbatches: int, plan: Plan | None = None
) -> list[int]:
    """In which order the clusters with costs of a step are to be planned, where members share
    parameters as `ways_to_share` says: first those that take least as a single stage; of a `plan`
    those alone that it was made for, or that have as many clusters."""
    every = range(len(ways))
    if len(ways) == 1:
        return [0]
    if plan is not None:
        made = [at for at in every if program_digest(ways[at]) == plan.program]
        alike = [at for at in every if ways[at].units == len(plan.stage_of_cluster)]
        return made or alike or [*every]
    seconds = [_alone_seconds(clusters, machine, microbatches) for clusters in ways]
    return sorted(every, key=seconds.__getitem__)


def first_planned(
    ways: Sequence[Way], planned: Callable[[Way], Planned], refused: type[Exception]
) -> Planned:
    """What is `planned` of the first way that is not `refused`, as where it finds no room. Raises
    what the last one raises."""
    for way in ways[:-1]:
        with contextlib.suppress(refused):
            return planned(way)
    return planned(ways[-1])


def _alone_seconds(clusters: Program, machine: Machine, microbatches: int) -> float:
    """A step's, as a single stage."""
    plan = Plan((0,) * clusters.units, gpipe(1, microbatches))
    program = overlap(timing_of(machine))(apply(plan)(clusters))
    return predict(program, lower(plan.schedule, program), machine).seconds
