"""Data parallelism: several pipelines that share the microbatches and reduce their gradients."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, get_args

import attrs
import torch

from pfeife.data.machine import Mesh
from pfeife.ir.program import Program, Reduction, Role, holders, returned
from pfeife.passes.send_recv import reduction_of

DataParallel = Literal["average", "shard"]
BUCKET_BYTES = 25 * 2**20  # as torch's DistributedDataParallel has it


def dp_wrap(
    mesh: Mesh,
    how: DataParallel = "average",
    *,
    bucket_bytes: int = BUCKET_BYTES,
    owners: Mapping[str, int | None] | None = None,
) -> Callable[[Program], Program]:
    """A pass that spreads a step's microbatches over the mesh's replicas.

    Every gradient gets a `Reduction` over all ranks of all replicas that hold it, which the
    schedule runs after the last weight gradient; those of a stage travel together in buckets of at
    most `bucket_bytes`, or of one gradient. This re-associates the sum over microbatches.

    "average": every replica gets all gradients. "shard": each gradient has one replica as its
    owner, the only one to get it, and so to keep optimizer state (ZeRO-2; Rajbhandari et al., SC
    2020); on every rank the replicas own about equally many bytes. `owners` has the replicas of
    those that have one already, None for what all train. Sparse gradients are not sharded. Where
    the loss is a sum or outside the step, gradients are added rather than averaged.

    Raises ValueError if the pipeline uses more ranks than the mesh has, or is replicated already,
    and for trained parameters that the step changes in place.
    """
    if how not in get_args(DataParallel) or bucket_bytes < 1:
        raise ValueError(
            f"dp_wrap({how!r}, bucket_bytes={bucket_bytes}): must be 'average' or 'shard', and a "
            "bucket has at least 1 byte"
        )

    def run(program: Program) -> Program:
        _check(program, mesh)
        if mesh.replicas == 1:
            return program
        trained = dict.fromkeys(port.fqn for port in program.ports(Role.GRADIENT))
        found = holders(program)
        wrapped = attrs.evolve(program, replicas=mesh.replicas)
        within = {one.name: frozenset(one.ranks) for one in program.reductions}
        reductions: Sequence[Reduction] = [
            attrs.evolve(
                reduction_of(name, found[name], within.get(name, ()), mesh.replicas),
                average=wrapped.averages,
            )
            for name in trained
        ]
        sizes = _Sizes(program)
        if how == "shard":
            reductions = _sharded(reductions, sizes, owners or {})
        return attrs.evolve(
            wrapped, reductions=tuple(_in_buckets(reductions, sizes, bucket_bytes))
        )

    return run


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


class _Sizes:
    """What gradients are, by their parameters' names."""

    def __init__(self, program: Program):
        results = returned(program.module)
        ports = program.ports(Role.GRADIENT)
        self.bytes = {port.fqn: port.bytes for port in ports}
        self.kinds = {p.fqn: (p.dtype, results[p.name].meta["val"].layout) for p in ports}

    def is_sparse(self, name: str) -> bool:
        return self.kinds[name][1] != torch.strided


def _sharded(
    reductions: Sequence[Reduction], sizes: _Sizes, owners: Mapping[str, int | None]
) -> list[Reduction]:
    """Each with its owner: the largest first, it goes where the fewest bytes are on its ranks."""
    known = {one.name: None for one in reductions if sizes.is_sparse(one.name)} | dict(owners)
    held: Counter[tuple[int, int]] = Counter()  # bytes by replica and rank

    def assign(one: Reduction, owner: int) -> None:
        known[one.name] = owner
        held.update({(owner, rank): sizes.bytes[one.name] for rank in one.ranks})

    for one in reductions:
        if (owner := known.get(one.name)) is not None:
            assign(one, owner)
    new = [one for one in reductions if one.name not in known]
    for one in sorted(new, key=lambda one: -sizes.bytes[one.name]):
        replicas = range(one.replicas)
        assign(one, min(replicas, key=lambda k: sum(held[k, rank] for rank in one.ranks)))
    return [attrs.evolve(one, owner=known[one.name]) for one in reductions]


def _in_buckets(
    reductions: Sequence[Reduction], sizes: _Sizes, bucket_bytes: int
) -> Iterator[Reduction]:
    """Each with the number of its bucket: those that are reduced at one time, over the same ranks,
    in one dtype."""
    open_: dict[tuple, tuple[int, int]] = {}  # number and bytes
    count = 0
    for one in reductions:
        kind, size = sizes.kinds[one.name], sizes.bytes[one.name]
        key = (one.stages[0], one.ranks, one.owner is None, kind)
        number, filled = open_.get(key, (-1, 0))
        if number < 0 or filled + size > bucket_bytes or sizes.is_sparse(one.name):
            number, filled, count = count, 0, count + 1
        open_[key] = number, filled + size
        yield attrs.evolve(one, bucket=number)
