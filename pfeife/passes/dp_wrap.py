"""Data parallelism: several pipelines that share the microbatches and reduce their gradients."""

from collections import Counter
from collections.abc import Callable, Sequence

import attrs

from pfeife.data.machine import Mesh
from pfeife.data.replicas import Replicas
from pfeife.ir.messages import holders
from pfeife.ir.parts import Reduction, Role
from pfeife.ir.program import Program
from pfeife.passes.reductions import Sizes, in_buckets, reduction_of


def dp_wrap(mesh: Mesh, replicas: Replicas | None = None) -> Callable[[Program], Program]:
    """A pass that spreads a step's microbatches over the mesh's replicas.

    Every gradient gets a `Reduction` over all ranks of all replicas that hold it, which the
    schedule runs after the last weight gradient, as `replicas` say (they average, unless given).
    This re-associates the sum over microbatches. To "shard", every gradient gets an owner, so that
    on every rank the replicas own about equally many bytes, of those that each member keeps; sparse
    ones get none. Where the loss is
    a sum or outside the step, gradients are added rather than averaged. What members of one
    pipeline add up travels in the same buckets.

    Raises ValueError for replicas that are not as many as the mesh's, if the pipeline uses more
    ranks than the mesh has, or is replicated already, and for trained parameters that the step
    changes in place.
    """
    replicas = replicas or Replicas(mesh.replicas)
    if replicas.count != mesh.replicas:
        raise ValueError(f"Replicas.count={replicas.count}: the mesh has {mesh.replicas} replicas")

    def run(program: Program) -> Program:
        _check(program, mesh)
        if mesh.replicas == 1:
            return _over_members(program, replicas.bucket_bytes)
        trained = dict.fromkeys(port.fqn for port in program.ports(Role.GRADIENT))
        calls_of = holders(program)
        wrapped = attrs.evolve(program, replicas=mesh.replicas)
        # Ranks that earlier programs train a parameter on stay, though this one may not use it
        # there.
        within = {reduction.name: frozenset(reduction.ranks) for reduction in program.reductions}
        reductions = [
            attrs.evolve(
                reduction_of(wrapped, name, calls_of[name], within.get(name, ())),
                average=wrapped.averages,
            )
            for name in trained
        ]
        sizes = Sizes(program)
        owned = _owned(reductions, sizes, replicas)
        buckets = in_buckets(owned, sizes, replicas.bucket_bytes)
        return attrs.evolve(wrapped, reductions=tuple(buckets))

    return run


def _over_members(program: Program, bucket_bytes: int) -> Program:
    """One pipeline, in which what members tell one another of gradients travels in buckets."""
    told = [each for each in program.reductions if each.members > 1 or each.split]
    alone = [each for each in program.reductions if each.members == 1 and not each.split]
    if not told:
        return program
    buckets = in_buckets(told, Sizes(program), bucket_bytes)
    return attrs.evolve(program, reductions=(*alone, *buckets))


def _check(program: Program, mesh: Mesh) -> None:
    ranks = 1 + max((call.rank or 0 for call in program.calls), default=0)
    if ranks > mesh.ranks or program.replicas != 1:
        raise ValueError(
            f"the pipeline has {ranks} ranks and {program.replicas} replicas, "
            f"the mesh has {mesh.ranks} ranks to a pipeline"
        )
    trained = {port.fqn for port in program.ports(Role.GRADIENT)}
    changed = trained & {port.fqn for port in program.ports(Role.BUFFER_UPDATE)}
    if changed and mesh.replicas > 1:
        raise ValueError(
            f"the step changes the parameter {min(changed)} in place, which would be another "
            "one in every replica: train it without replicas, or change it outside of the step"
        )


def _owned(
    reductions: Sequence[Reduction], sizes: Sizes, replicas: Replicas
) -> Sequence[Reduction]:
    """Each with its owner. New ones that are sharded go where the fewest bytes are on their ranks,
    the largest first."""
    owners = {reduction.name: replicas.owners.get(reduction.name) for reduction in reductions}
    held: Counter[tuple] = Counter()  # bytes by replica, rank, and the member that keeps them

    def shares(reduction: Reduction, replica: int) -> list[tuple]:
        keeper = sizes.keepers[reduction.name]
        return [(replica, rank, keeper) for rank in reduction.ranks]

    def assign(reduction: Reduction, owner: int) -> None:
        owners[reduction.name] = owner
        held.update(dict.fromkeys(shares(reduction, owner), sizes.given[reduction.name]))

    for reduction in reductions:
        # it stays where its optimizer state is; the new ones even out the bytes
        if (owner := owners[reduction.name]) is not None:
            assign(reduction, owner)
    new = [
        reduction
        for reduction in reductions
        if replicas.how == "shard"
        and reduction.name not in replicas.owners
        and not sizes.is_sparse(reduction.name)
    ]
    # Largest first, each to the replica that has least (the LPT rule; Graham, 1969). It depends on
    # names and sizes alone, so that every rank decides the same.
    for reduction in sorted(new, key=lambda reduction: -sizes.given[reduction.name]):
        counts = [
            sum(held[share] for share in shares(reduction, k)) for k in range(reduction.replicas)
        ]
        assign(reduction, counts.index(min(counts)))
    return [_given_to(reduction, owners[reduction.name], sizes) for reduction in reductions]


def _given_to(reduction: Reduction, owner: int | None, sizes: Sizes) -> Reduction:
    """With its owner, of whose members the one that keeps the parameter gets what all add up."""
    if reduction.members == 1:
        return attrs.evolve(reduction, owner=owner)
    keeper = None if owner is None else sizes.keepers[reduction.name]
    return attrs.evolve(reduction, owner=owner, keeper=keeper)
