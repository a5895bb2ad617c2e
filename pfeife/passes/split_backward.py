"""Backward into input-gradient and weight-gradient parts (zero bubble, ICLR 2024, section 2)."""

from collections.abc import Callable

import attrs
from torch import fx

from pfeife.outline import Group, inline, outline
from pfeife.passes.partition import views_of_inputs
from pfeife.program import Kind, Program, Role, is_source, returned


def split_backward() -> Callable[[Program], Program]:
    """A pass that splits every stage's backward in two.

    The input-backward is what other stages' backwards wait for; where none waits (the first
    stage), what more than one gradient is computed from. All else is weight-backward.
    """

    def run(program: Program) -> Program:
        flat, groups = inline(program)
        needed = _needed_early(flat, groups)
        split = {
            name: Group(group.unit, _part(name in needed)) if group.kind == Kind.BACKWARD else group
            for name, group in groups.items()
        }
        parts = outline(flat, split, views_of_inputs(flat))
        ranks = {call.unit: call.rank for call in program.calls}
        calls = tuple(attrs.evolve(call, rank=ranks[call.unit]) for call in parts.calls)
        return attrs.evolve(parts, calls=calls)

    return run


def _part(early: bool) -> Kind:
    return Kind.INPUT_BACKWARD if early else Kind.WEIGHT_BACKWARD


def _needed_early(flat: Program, groups: dict[str, Group]) -> set[str]:
    """Names of backward nodes that belong into the input-backward of their stage."""
    gradients = {port.name for port in flat.ports(Role.GRADIENT)}
    results = returned(flat.module)
    waited_for = {node for name, node in results.items() if name not in gradients}
    backward = [
        node
        for node in flat.module.graph.nodes
        if not is_source(node) and node.op != "output" and groups[node.name].kind == Kind.BACKWARD
    ]
    unit = {node: groups[node.name].unit for node in backward}
    early: dict[fx.Node, bool] = {}
    feeds: dict[fx.Node, set[str]] = {}
    for node in reversed(backward):
        inside = [user for user in node.users if unit.get(user) == unit[node]]
        outside = any(user in unit and unit[user] != unit[node] for user in node.users)
        early[node] = outside or node in waited_for or any(early[user] for user in inside)
        names = {name for name in gradients if results.get(name) is node}
        feeds[node] = names.union(*(feeds[user] for user in inside))
    ahead = {unit[node] for node in backward if early[node]}
    return {
        node.name
        for node in backward
        if early[node] or (unit[node] not in ahead and len(feeds[node]) > 1)
    }
