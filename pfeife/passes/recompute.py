"""What a stage's backward computes again instead of keeping it since the forward."""

import operator
from collections.abc import Mapping
from typing import Any

import attrs
from torch import fx

from pfeife.data.plan import Plan
from pfeife.ir.editing.copying import Copy, copied
from pfeife.ir.nodes import has_effects
from pfeife.ir.outline import Group
from pfeife.ir.parts import Kind, Role
from pfeife.ir.program import Program


def recomputed(
    flat: Program, groups: Mapping[str, Group], plan: Plan
) -> tuple[Program, dict[str, Group]]:
    """A flat program whose backwards read copies of what the plan has them recompute.

    A copy stands before the first node that reads it and belongs to that backward; forwards lose
    what then nobody reads, and other stages are sent what they were. Copies read the buffers of
    the same microbatch's forward, and random operations draw what they drew there. Raises
    ValueError for names that are no nodes of the stage's forward, or for a buffer that the
    forward would no longer read.
    """
    if not plan.recompute:
        return flat, dict(groups)
    # Dead code is what the forwards computed for the backwards alone; an updated buffer that is
    # read by nothing else then has no reader from which the runtime would know its old value.
    again = _Again(_named(flat, groups, plan), groups)
    copy = copied(flat.module, again.written)
    copy.graph.eliminate_dead_code(has_effects)
    result = attrs.evolve(flat, module=copy.module())
    before = _readers_of_updated(flat, groups)
    for name in sorted(before - _readers_of_updated(result, again.groups)):
        raise ValueError(
            f"the plan recomputes all that the forward reads buffer {name} for, and the "
            "step updates it: its old value would be lost; recompute less of it"
        )
    names = {node.name for node in copy.graph.nodes}
    return result, {name: group for name, group in again.groups.items() if name in names}


def _named(flat: Program, groups: Mapping[str, Group], plan: Plan) -> set[fx.Node]:
    """The nodes that a plan has recomputed, parts of tuples with their makers."""
    nodes = {node.name: node for node in flat.module.graph.nodes}
    named: set[fx.Node] = set()
    for stage, option in enumerate(plan.recompute):
        for name in option.names:
            if name in plan.duplicated:
                continue  # every body that reads it computes it anyhow
            if groups.get(name) != Group(stage, Kind.FORWARD):
                raise ValueError(f"the plan recomputes {name}, which stage {stage} does not make")
            named.add(nodes[name])
            while nodes[name].target is operator.getitem:
                name = nodes[name].all_input_nodes[0].name
                named.add(nodes[name])
    return named


class _Again:
    """What a graph's nodes become; a copy of what is recomputed stands where it is read first.

        before:  a -> b -> c | dc -> db(b) -> da(a)          b is recomputed by this stage
        after:   a -> b -> c | dc, b_again(a) -> db(b_again) -> da(a)

    Chains of copies are as long as a stage's forward, so they are followed by a list of what is
    pending rather than by calls, of which Python allows a thousand.
    """

    def __init__(self, named: set[fx.Node], groups: Mapping[str, Group]):
        self.named, self.groups = named, dict(groups)
        self.copies: dict[fx.Node, fx.Node] = {}

    def written(self, node: fx.Node, copy: Copy) -> fx.Node | None:
        """A node of a backward, behind copies of what it reads that the plan has it recompute."""
        group = self.groups.get(node.name)
        if group is None or group.kind == Kind.FORWARD:
            return None

        def repeats(value: fx.Node) -> bool:
            return value in self.named and self.groups[value.name].unit == group.unit

        def read(value: fx.Node) -> Any:
            return self.copies[value] if repeats(value) else copy.here[value]

        pending = [source for source in reversed(node.all_input_nodes) if repeats(source)]
        while pending:
            missing = [
                source
                for source in pending[-1].all_input_nodes
                if repeats(source) and source not in self.copies
            ]
            # each is copied behind what it reads; a node may be pending twice, for two readers
            if missing:
                pending += reversed(missing)
                continue
            last = pending.pop()
            if last not in self.copies:
                args, kwargs = fx.node.map_arg((last.args, last.kwargs), read)
                again = self.copies[last] = copy.graph.create_node(
                    last.op, last.target, args, kwargs, name=f"{last.name}_again"
                )
                again.meta = dict(last.meta)
                self.groups[again.name] = group
        return copy.keep(node, read=read)


def _readers_of_updated(flat: Program, groups: Mapping[str, Group]) -> set[str]:
    """The updated buffers that forwards read: there the runtime sees which value is theirs."""
    updated = {port.fqn for port in flat.ports(Role.BUFFER_UPDATE)}
    names = {port.name: port.fqn for port in flat.ports(Role.BUFFER) if port.fqn in updated}
    return {
        names[node.name]
        for node in flat.module.graph.nodes
        if node.name in names
        and any(u.name in groups and groups[u.name].kind == Kind.FORWARD for u in node.users)
    }
