"""The options `parallel` and `members`: how a step's parameters are cut over a group of ranks."""

import functools
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import nn

from pfeife.backend.building.task import Task
from pfeife.cost.estimate import member_prices
from pfeife.factors import Place
from pfeife.frontend.captured import Captured
from pfeife.frontend.placements import placements
from pfeife.ir.parts import Role
from pfeife.passes import shard
from pfeife.passes.compose import Pass
from pfeife.passes.shard import Every, Placements, Word, of_all, ways_to_share
from pfeife.runtime.distributed.state.owned import Owned


def sharding(task: Task, captured: Captured) -> Sequence[Sequence[Pass]]:
    """The passes that make the program that of one member, none where there is one alone, for each
    of the `ways_to_share` parameters. Raises ValueError in one process, which cannot be several
    members."""
    options = task.options
    members, microbatches = options.members, options.microbatches // options.replicas
    if members == 1:
        return [[]]
    if task.world is None:
        raise ValueError(
            f"option members={members}: the members of a group are processes; start {members} for "
            "each stage (torchrun --nproc-per-node)"
        )
    owned = _owned(task, captured)
    keepers = {name: owner.member for name, owner in owned.items() if owner.member is not None}
    every = isinstance(options.parallel, str)
    sharded = functools.partial(
        shard,
        members=members,
        unknown="gather" if every else "refuse",
        attention=options.attention,
        keepers=keepers,
        prices=member_prices(task.machine(captured.program), microbatches),
        # Dynamo's graph may have been captured at those of another call.
        sizes=captured.sizes(task.args, options.cut),
        decided=task.world.decided_by_rank_zero,
    )
    if not every:
        return [[sharded(_placements(task, captured))]]
    ways: Any = ways_to_share(options.parallel)
    return [[sharded(_of_all(way, captured, owned))] for way in ways]


def _of_all(every: Every, captured: Captured, owned: Mapping[str, Owned]) -> Placements:
    """The same for all of them; but what an earlier program has shared among members, or not, stays
    so."""
    shared: Word = "shared" if every == "auto" else every
    known: Placements = {
        name: None if owner.member is None else shared for name, owner in owned.items()
    }
    return {**of_all(every, captured.program.ports(Role.PARAMETER)), **known}


def _owned(task: Task, captured: Captured) -> dict[str, Owned]:
    """The owners that parameters have since an earlier program was built."""
    assert task.world is not None
    slots, known = task.slots(captured), task.world.ownership.known
    ports = captured.program.ports(Role.PARAMETER)
    return {port.fqn: known[slots[port.name]] for port in ports if slots[port.name] in known}


def _placements(task: Task, captured: Captured) -> Placements:
    """The dimensions of parameters: by patterns of their own names as they were given, by their
    canonical ones where a plan names modules."""
    asked: Any = task.options.parallel
    by_name = {
        name: place
        for name, place in asked.items()
        if isinstance(place, int | Place) or place == "gathered"
    }
    plan = {name: style for name, style in asked.items() if name not in by_name}
    # What the step calls a parameter depends on how it reaches the model: the tensor is the same.
    roots = nn.ModuleList(task.graph.inputs.modules)
    tensors = dict(roots.named_parameters(remove_duplicate=False))
    dims: dict[int, Any] = {id(tensors[name]): dim for name, dim in placements(roots, plan).items()}
    own = [*chain(*(root.named_parameters(remove_duplicate=False) for root in roots))]
    dims |= {id(tensor): by_name[name] for name, tensor in own if name in by_name}
    slots, ports = task.slots(captured), captured.program.ports(Role.PARAMETER)
    planned = {port.fqn: dims[id(t)] for port in ports if id(t := slots[port.name]) in dims}
    in_models = {name for name, _ in own}
    patterns = {name: dim for name, dim in by_name.items() if name not in in_models}
    return {**patterns, **planned}
