"""Parallelism inside of a stage: a flat program of whole values as that of one of its members."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Literal

import attrs

from pfeife.factors.equation import Place
from pfeife.ir.members import Split
from pfeife.ir.parts import Port, Role
from pfeife.ir.program import Program
from pfeife.passes.member_graph import Member


def shard(
    placements: Mapping[str, int | Place],
    members: int,
    *,
    unknown: Literal["refuse", "gather"] = "refuse",
    keepers: Mapping[str, int] | None = None,
) -> Callable[[Program], Program]:
    """A pass that cuts parameters over the members of a group, and all that is computed of them.

    `placements` says along which dimension, by patterns of names ("layers.*.q.weight": 0); a
    `Place(0, 3)` cuts each of three blocks of it, as of queries, keys and values in one. Each
    operation is computed along the factor for which the fewest bytes are sent (see `factors`), and
    where it is a sum over that, all members' parts are added at once. Optimizers, losses and
    results see what they saw: a gradient is cut as its parameter is, all else is whole. A dropout
    draws what it draws on one device.

    The result is the program of any one of the members; `pfeife.evaluate` runs it for all of them,
    on whole values. It agrees with the program that was given to within the rounding of sums that
    are cut. What has no rule is refused by its line, or, with `unknown="gather"`, computed by each
    member as a whole. With `keepers` each parameter that is cut is whole on one member, which is
    given its whole gradient and tells the others their parts in each step: so any optimizer does
    with it what it does on one device. They are named, by names of parameters, or chosen so that
    each member keeps about as many bytes.

    Raises ValueError for a pattern that no parameter has, a dimension that is not there or that
    `members` does not divide, an operation without a rule, open sizes, and a program that is not
    flat.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> flat = pfeife.capture(lambda x: net(x).mean(), torch.ones(2, 4))
    >>> local = pfeife.shard({"0.*": 0, "2.weight": 1}, members=2)(flat)
    >>> [node.name for node in local.module.graph.nodes if "all_" in node.name]
    ['all_reduce']
    """

    def run(program: Program) -> Program:
        if program.calls or program.members > 1:
            raise ValueError("shard: the program is fused or sharded already; shard a flat one")
        if program.ports(Role.SIZE):
            raise ValueError(
                "shard: the program has open sizes; capture it with dynamic=False, by "
                "pfeife.compile(step, dynamic=False) and not by torch.compile's name"
            )
        splits = _splits(program, placements, members)
        local = Member(program, splits, members, unknown == "gather").program()
        return local if keepers is None else _kept(local, keepers)

    return run


def _kept(program: Program, keepers: Mapping[str, int]) -> Program:
    """The same, whose parameters and gradients are whole on one member each."""
    kept_bytes, chosen = [0] * program.members, dict(keepers)
    for port in program.ports(Role.PARAMETER):
        if port.split:
            least = kept_bytes.index(min(kept_bytes))
            kept_bytes[chosen.setdefault(port.fqn, least)] += port.bytes
    inputs, outputs = (
        tuple(attrs.evolve(p, keeper=chosen[p.fqn] if p.split else None) for p in ports)
        for ports in (program.inputs, program.outputs)
    )
    return attrs.evolve(program, inputs=inputs, outputs=outputs)


def _splits(
    program: Program, placements: Mapping[str, int | Place], members: int
) -> dict[str, Split]:
    """How parameters are cut, by their names."""
    splits: dict[str, Split] = {}
    for pattern, dim in placements.items():
        place = dim if isinstance(dim, Place) else Place(dim)
        ports = [
            port
            for port in program.ports(Role.PARAMETER)
            if any(fnmatchcase(name, pattern) for name in port.names)
        ]
        if not ports:
            raise ValueError(f"shard: no parameter is called {pattern!r}")
        splits |= {port.fqn: _split(port, place, members) for port in ports}
    return splits


def _split(port: Port, place: Place, members: int) -> Split:
    rank = len(port.shape)
    if not -rank <= place.dim < rank:
        raise ValueError(f"shard: {port.fqn} of shape {port.shape} has no dimension {place.dim}")
    size = port.shape[place.dim]
    if size % (members * place.before):
        blocks = f"{place.before} blocks for " if place.before > 1 else ""
        raise ValueError(
            f"shard: dimension {place.dim} of {port.fqn} has {size} elements, which "
            f"{blocks}{members} members do not divide"
        )
    return Split(place.dim % rank, members, place.before)
