"""What stages compute for themselves, since that is faster than to receive it."""

import math
from collections.abc import Collection

from torch import fx

from pfeife.cost.estimate import node_seconds
from pfeife.data.machine import Machine
from pfeife.ir.nodes import is_source, node_bytes
from pfeife.ir.outline import inline
from pfeife.ir.parts import Kind, Role
from pfeife.ir.program import Program
from pfeife.ir.seeding import seeded


def cheap_to_recompute(
    program: Program, machine: Machine, owned: Collection[str] = ()
) -> tuple[str, ...]:
    """Forward values that a stage computes faster for itself than it would receive them.

    Masks, rotary tables and their like: they depend on inputs only (no parameters, no updated
    buffers, no random numbers, nothing of what is `owned` on some ranks alone), and their whole
    computation is estimated to take less than a transfer. Names are those of the inlined program.
    """
    flat, groups = inline(program)
    updated = {*owned, *(port.fqn for port in flat.ports(Role.BUFFER_UPDATE))}
    plain = {
        port.name
        for port in flat.ports(Role.BUFFER, Role.CONSTANT, Role.BATCH)
        if port.fqn not in updated
    }
    # By node all that has to be computed for it, from what every rank has.
    cones: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in flat.module.graph.nodes:
        if node.op == "get_attr" or node.name in plain:
            cones[node] = frozenset()
        elif (
            not is_source(node)
            and node.op == "call_function"
            and node.target is not seeded
            and groups[node.name].kind == Kind.FORWARD
            and all(source in cones for source in node.all_input_nodes)
        ):
            cones[node] = frozenset({node}).union(*(cones[s] for s in node.all_input_nodes))
    cheap: set[str] = set()
    seconds_of = {node: node_seconds(node, machine) for node in cones}
    for node, cone in cones.items():
        seconds = math.fsum(seconds_of[n] for n in cone)
        # Who computes it computes all of its cone, so that none of it has to be sent.
        if cone and seconds < machine.transfer_seconds(node_bytes(node)):
            cheap |= {n.name for n in cone}
    order = [node.name for node in flat.module.graph.nodes]
    return tuple(name for name in order if name in cheap)
