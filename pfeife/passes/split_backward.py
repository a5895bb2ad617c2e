"""Backward into input-gradient and weight-gradient parts (zero bubble, ICLR 2024, section 2)."""

from collections.abc import Callable, Mapping

import attrs
from torch import fx

from pfeife.ir.flops import graph_flops
from pfeife.ir.nodes import is_source, returned
from pfeife.ir.outline import Group, inline, outline
from pfeife.ir.parts import Call, Kind, Role
from pfeife.ir.program import Program
from pfeife.passes.partition import views_of_inputs


def split_backward() -> Callable[[Program], Program]:
    """A pass that splits every stage's backward in two.

    The input-backward is what other stages' backwards wait for; where none waits (the first
    stage), what more than one gradient is computed from. All else is weight-backward. So what a
    backward recomputes comes with the part that reads it: with the input-backward only as far
    as that needs it, from where the weight-backward gets it too. The parts share the seconds of
    the whole by their floating-point operations.
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
        placed = tuple(attrs.evolve(call, rank=ranks[call.unit]) for call in parts.calls)
        return _with_costs(attrs.evolve(parts, calls=placed), program)

    return run


def join_backward() -> Callable[[Program], Program]:
    """A pass that makes every cluster's backward whole again; what undoes `split_backward`."""

    def run(program: Program) -> Program:
        flat, groups = inline(program)
        whole = {
            name: group if group.kind == Kind.FORWARD else Group(group.unit, Kind.BACKWARD)
            for name, group in groups.items()
        }
        return _with_costs(outline(flat, whole, word="cluster"), program)

    return run


def _with_costs(program: Program, before: Program) -> Program:
    """The program with the costs of a unit's forward and backward as they were, however many parts
    a backward is in now."""
    calls_before = _by_side(before)
    calls = {call.node: call for call in program.calls}
    for side, parts in _by_side(program).items():
        seconds = [call.seconds for call in calls_before[side]]
        whole = [duration for duration in seconds if duration is not None]
        if len(whole) < len(seconds):
            continue
        work = [sum(graph_flops(program.body(call).graph).values()) for call in parts]
        # A kernel's time is not known by its operations, but their ratio is the best that is.
        shares = (
            [flops / sum(work) for flops in work] if any(work) else [1 / len(parts)] * len(parts)
        )
        adding = sum(call.accumulate_seconds for call in calls_before[side])
        inside = max(call.inside_bytes for call in calls_before[side])
        for call, share in zip(parts, shares, strict=True):
            # gradients are added up where they are complete: at the end of the last part
            adds = adding if call is parts[-1] else 0.0
            calls[call.node] = attrs.evolve(
                call,
                seconds=share * sum(whole),
                accumulate_seconds=adds,
                inside_bytes=inside,
            )
    return attrs.evolve(program, calls=tuple(calls.values()))


def _by_side(program: Program) -> dict[tuple[int, bool], list[Call]]:
    """The calls of the forward and of the backward of each unit, the weight-backward last."""
    sides: dict[tuple[int, bool], list[Call]] = {}
    for call in sorted(program.calls, key=lambda call: call.kind == Kind.WEIGHT_BACKWARD):
        sides.setdefault((call.unit, call.kind == Kind.FORWARD), []).append(call)
    return sides


def _part(early: bool) -> Kind:
    return Kind.INPUT_BACKWARD if early else Kind.WEIGHT_BACKWARD


def _needed_early(flat: Program, groups: dict[str, Group]) -> set[str]:
    """Names of backward nodes that belong into the input-backward of their stage.

    Within a stage a node is early if another stage, or the caller, waits for what it leads to:

        arriving gradient -> through the activation -+-> gradient of the input    early
                                                     +-> gradient of a weight     late

    Both sweeps go from the readers to what they read, so each node is looked at once.
    """
    # A stage of two linear layers, of which the gradient of x is waited for; w1 and w2 are its own:
    #
    #     g ---> d2 = g @ w2.T ---> d1 = d2 @ w1.T ---> to the stage before    input-backward
    #     |      |
    #     |      +-> grad w1 = x.T @ d2                                        weight-backward
    #     +--------> grad w2 = h.T @ g                                         weight-backward
    #
    # On the first stage nobody waits for d1, and it is not computed at all. d2 leads to one
    # gradient only, so there both are late; with a third layer below, d2 leads to two, and is
    # early.
    gradients = {port.name for port in flat.ports(Role.GRADIENT)}
    waited_for: set[fx.Node] = set()
    gradient_names: dict[fx.Node, set[str]] = {}
    for name, node in returned(flat.module).items():
        if name in gradients:
            gradient_names.setdefault(node, set()).add(name)
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
        feeds[node] = gradient_names.get(node, set()).union(*(feeds[user] for user in inside[node]))
    # Nobody waits for the first stage's backward, so by the rule above all of it would be late. Its
    # weights' gradients wait for the chain through its activations, though, so that is early: what
    # leads to more than one gradient.
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
    derived: set[fx.Node] = set()
    for node in unit:  # in the graph's order
        sources = node.all_input_nodes
        if any(
            source.name in tangents
            or source in derived
            or unit.get(source, unit[node]) != unit[node]
            for source in sources
        ):
            derived.add(node)
    return derived
