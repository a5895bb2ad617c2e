"""Backward into input-gradient and weight-gradient parts (zero bubble, ICLR 2024, section 2)."""

from collections.abc import Callable, Mapping

import attrs
from torch import fx

from pfeife.ir.outline import Group, inline, outline
from pfeife.ir.program import Kind, Program, Role, is_source, returned
from pfeife.passes.partition import views_of_inputs


def split_backward() -> Callable[[Program], Program]:
    """A pass that splits every stage's backward in two.

    The input-backward is what other stages' backwards wait for; where none waits (the first
    stage), what more than one gradient is computed from. All else is weight-backward. So what a
    backward recomputes comes with the part that reads it: with the input-backward only as far
    as that needs it, from where the weight-backward gets it too.
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


def join_backward() -> Callable[[Program], Program]:
    """A pass that makes every cluster's backward whole again; what undoes `split_backward`."""

    def run(program: Program) -> Program:
        flat, groups = inline(program)
        whole = {
            name: group if group.kind == Kind.FORWARD else Group(group.unit, Kind.BACKWARD)
            for name, group in groups.items()
        }
        joined = outline(flat, whole, word="cluster")
        seconds = {call.node: call.seconds for call in program.calls}
        calls = tuple(attrs.evolve(c, seconds=seconds.get(c.node)) for c in joined.calls)
        return attrs.evolve(joined, calls=calls)

    return run


def _part(early: bool) -> Kind:
    return Kind.INPUT_BACKWARD if early else Kind.WEIGHT_BACKWARD


def _needed_early(flat: Program, groups: dict[str, Group]) -> set[str]:
    """Names of backward nodes that belong into the input-backward of their stage."""
    gradients = {port.name for port in flat.ports(Role.GRADIENT)}
    waited_for: set[fx.Node] = set()
    made: dict[fx.Node, set[str]] = {}
    for name, node in returned(flat.module).items():
        if name in gradients:
            made.setdefault(node, set()).add(name)
        else:
            waited_for.add(node)
    backward = [
        node
        for node in flat.module.graph.nodes
        if not is_source(node) and node.op != "output" and groups[node.name].kind == Kind.BACKWARD
    ]
    unit = {node: groups[node.name].unit for node in backward}
    inside = {node: [u for u in node.users if unit.get(u) == unit[node]] for node in backward}
    early: set[fx.Node] = set()
    feeds: dict[fx.Node, set[str]] = {}
    for node in reversed(backward):
        outside = any(user in unit and unit[user] != unit[node] for user in node.users)
        if outside or node in waited_for or not early.isdisjoint(inside[node]):
            early.add(node)
        feeds[node] = made.get(node, set()).union(*(feeds[user] for user in inside[node]))
    ahead = {unit[node] for node in early}
    arriving = _of_gradients(flat, unit)
    for node in reversed(backward):  # where nobody waits
        shared = node in arriving and len(feeds[node]) > 1
        if unit[node] not in ahead and (shared or not early.isdisjoint(inside[node])):
            early.add(node)
    return {node.name for node in early}


def _of_gradients(flat: Program, unit: Mapping[fx.Node, int]) -> set[fx.Node]:
    """The backward nodes that are computed from a gradient that arrives at their stage."""
    tangents = {port.name for port in flat.ports(Role.TANGENT)}
    found: set[fx.Node] = set()
    for node in unit:  # in the graph's order
        sources = node.all_input_nodes
        if any(
            source.name in tangents or source in found or unit.get(source, unit[node]) != unit[node]
            for source in sources
        ):
            found.add(node)
    return found
