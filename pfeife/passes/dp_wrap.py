"""Data parallelism: several pipelines that average their gradients."""

from collections.abc import Callable

import attrs

from pfeife.data.machine import Mesh
from pfeife.ir.program import Program, Role, holders
from pfeife.passes.send_recv import reduction_of


def dp_wrap(mesh: Mesh) -> Callable[[Program], Program]:
    """A pass that spreads a step's microbatches over the mesh's replicas.

    Where the loss is a sum or outside the step, gradients are added rather than averaged.
    Every gradient gets a `Reduction` over all ranks of all replicas that hold it, which the
    schedule runs after the last weight gradient. This re-associates the sum over microbatches.
    Raises ValueError if the pipeline uses more ranks than the mesh has, or is replicated already,
    and for trained parameters that the step changes in place.
    """

    def run(program: Program) -> Program:
        ranks = 1 + max((call.rank or 0 for call in program.calls), default=0)
        if ranks > mesh.ranks or program.replicas != 1:
            raise ValueError(
                f"the pipeline has {ranks} ranks and {program.replicas} replicas, "
                f"the mesh has {mesh.ranks} ranks to a pipeline"
            )
        if mesh.replicas == 1:
            return program
        trained = dict.fromkeys(port.fqn for port in program.ports(Role.GRADIENT))
        changed = trained.keys() & {port.fqn for port in program.ports(Role.BUFFER_UPDATE)}
        if changed:
            raise ValueError(
                f"the step changes the parameter {min(changed)} in place, which would be another "
                "one in every replica: train it without replicas, or change it outside of the step"
            )
        found = holders(program)
        wrapped = attrs.evolve(program, replicas=mesh.replicas)
        within = {one.name: frozenset(one.ranks) for one in program.reductions}
        reductions = [
            reduction_of(name, found[name], within.get(name, ()), mesh.replicas) for name in trained
        ]
        return attrs.evolve(
            wrapped,
            reductions=tuple(attrs.evolve(one, average=wrapped.averages) for one in reductions),
        )

    return run
